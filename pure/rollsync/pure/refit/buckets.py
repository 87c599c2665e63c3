"""The bucket plan: where in the stream of transfer buffers each byte of each tensor lies.

A sender packs tensors in stream order into buckets of one size. A tensor begins at the next
aligned offset; what does not fit is cut and goes on in the next bucket, so every bucket but the
last is full.

Rules kept here:

- the plan is the fold of `place_tensor`, which looks at one tensor and the cursor only, so a
  sender that learns its shapes one by one makes the same plan as one that declared them all;
- offsets and cuts are multiples of `ALIGNMENT_BYTES`, so every chunk is a whole number of elements
  at an address that its dtype can be read from;
- `place_tensor` is total: what can be wrong with a tensor is found before, by `check_tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import Final

from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.errors import (
    BucketSizeUnaligned,
    NegativeDimension,
    PlanError,
    TensorNamedTwice,
    UnknownDtype,
)

ALIGNMENT_BYTES: Final = 256
"""A multiple of every element's size, and what device memory allocators align to."""


class TensorSpec(Struct, frozen=True, array_like=True, gc=False):
    """What a tensor is, without its contents.

    Attributes:
        name: Its first name in the stream.
        shape: Its dimensions, in elements; empty for a 0-dimensional tensor of one element.
        dtype: The name of its torch dtype, without `torch.`: `bfloat16`.
        aliases: Further names of the same contents (tied weights): sent once, received under
            every name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, the first one first."""
        return (self.name, *self.aliases)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of its contents in row-major order. KeyError for a dtype that is unknown."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Chunk(Struct, frozen=True, array_like=True, gc=False):
    """The part of one tensor that lies in one bucket.

    Attributes:
        bucket: Index of the bucket in the stream, from 0.
        offset: Byte in the bucket at which it begins, a multiple of `ALIGNMENT_BYTES`.
        chunk_offset: Byte in the tensor (its contents in row-major order) at which it begins.
        chunk_bytes: Its length; 0 only for the one chunk of a tensor without bytes.
    """

    bucket: int
    offset: int
    chunk_offset: int
    chunk_bytes: int


class Placement(Struct, frozen=True, array_like=True, gc=False):
    """One tensor and its chunks, in order; there is always at least one."""

    spec: TensorSpec
    chunks: tuple[Chunk, ...]


class StreamSize(Struct, frozen=True, kw_only=True):
    """How much a stream moves: the figures of its `BucketPlan`, without the places.

    Attributes:
        payload_bytes: Bytes of all tensors, without padding.
        moved_bytes: Payload, and padding between tensors.
        buckets: How many are filled.
        fullest_bucket_bytes: How far the fullest one is.
        last_bucket_bytes: How far the last one is.
        largest_bytes: Bytes of its largest tensor.
    """

    payload_bytes: int
    moved_bytes: int
    buckets: int
    fullest_bucket_bytes: int
    last_bucket_bytes: int
    largest_bytes: int


class Cursor(Struct, frozen=True, array_like=True, gc=False):
    """How far a stream has filled its buckets: `filled_bytes` of the bucket `bucket`."""

    bucket: int = 0
    filled_bytes: int = 0


class BucketPlan(Struct, frozen=True):
    """Where every byte of a stream of tensors lies.

    Attributes:
        bucket_bytes: Size of a bucket, a multiple of `ALIGNMENT_BYTES`.
        placements: Every tensor in stream order.
        filled_bytes: For each bucket, how much of it has to be moved: up to the end of its last
            chunk.
    """

    bucket_bytes: int
    placements: tuple[Placement, ...]
    filled_bytes: tuple[int, ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in stream order."""
        return tuple(placement.spec for placement in self.placements)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(placement.spec.tensor_bytes for placement in self.placements)

    @property
    def moved_bytes(self) -> int:
        """Bytes that a transfer moves: payload, and padding between tensors."""
        return sum(self.filled_bytes)


def check_bucket_bytes(bucket_bytes: int) -> BucketSizeUnaligned | None:
    """What is wrong with a bucket size, or None."""
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT_BYTES:
        return BucketSizeUnaligned(bucket_bytes=bucket_bytes, alignment_bytes=ALIGNMENT_BYTES)
    return None


def check_tensor(
    spec: TensorSpec, names: Set[str]
) -> TensorNamedTwice | UnknownDtype | NegativeDimension | None:
    """What is wrong with the next tensor of a stream, or None.

    Args:
        spec: The tensor.
        names: Every name (aliases too) of the tensors before it.
    """
    if spec.name in names or (spec.aliases and not _are_new(spec, names)):
        return TensorNamedTwice(tensor=spec.name, aliases=spec.aliases)
    if spec.dtype not in DTYPE_BYTES:
        return UnknownDtype(tensor=spec.name, dtype=spec.dtype)
    for size in spec.shape:
        if size < 0:
            return NegativeDimension(tensor=spec.name, shape=spec.shape)
    return None


def _are_new(spec: TensorSpec, names: Set[str]) -> bool:
    own = {spec.name, *spec.aliases}
    return len(own) == 1 + len(spec.aliases) and own.isdisjoint(names)


def place_tensor(
    cursor: Cursor, spec: TensorSpec, bucket_bytes: int
) -> tuple[Cursor, tuple[Chunk, ...]]:
    """The one-tensor step: where the next tensor of a stream goes, and the cursor after it.

    Args:
        cursor: The stream so far; `Cursor()` at its start.
        spec: The tensor, one that `check_tensor` finds nothing wrong with.
        bucket_bytes: Size of a bucket, one that `check_bucket_bytes` finds nothing wrong with.
    """
    after, chunk = place_first(cursor, spec, bucket_bytes)
    if after.bucket == chunk.bucket:
        return after, (chunk,)
    chunks = [chunk]
    size = spec.tensor_bytes
    following = chunk_after(chunk, size, bucket_bytes)
    while following is not None:
        chunks.append(following)
        following = chunk_after(following, size, bucket_bytes)
    return after, tuple(chunks)


def place_first(cursor: Cursor, spec: TensorSpec, bucket_bytes: int) -> tuple[Cursor, Chunk]:
    """`place_tensor` without all chunks but the first: its time does not grow with the tensor.

    The others follow one by one with `chunk_after`.
    """
    size = math.prod(spec.shape) * DTYPE_BYTES[spec.dtype]
    bucket = cursor.bucket
    offset = cursor.filled_bytes + -cursor.filled_bytes % ALIGNMENT_BYTES
    if size and offset == bucket_bytes:
        bucket, offset = bucket + 1, 0
    end = offset + size
    if end <= bucket_bytes:
        return Cursor(bucket, end), Chunk(bucket, offset, 0, size)
    full, rest = divmod(end - 1, bucket_bytes)
    return Cursor(bucket + full, rest + 1), Chunk(bucket, offset, 0, bucket_bytes - offset)


def chunk_after(chunk: Chunk, tensor_bytes: int, bucket_bytes: int) -> Chunk | None:
    """The chunk that follows one of a tensor of `tensor_bytes`; None after the last."""
    chunk_offset = chunk.chunk_offset + chunk.chunk_bytes
    if chunk_offset == tensor_bytes:
        return None
    return Chunk(chunk.bucket + 1, 0, chunk_offset, min(tensor_bytes - chunk_offset, bucket_bytes))


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> Result[BucketPlan, PlanError]:
    """Plans a whole stream.

    Args:
        specs: The tensors in the order in which they are sent.
        bucket_bytes: Size of one bucket, a multiple of `ALIGNMENT_BYTES`.
    """
    unaligned = check_bucket_bytes(bucket_bytes)
    if unaligned is not None:
        return Failure(unaligned)
    cursor = Cursor()
    names: set[str] = set()
    placements: list[Placement] = []
    filled_bytes: list[int] = []
    for spec in specs:
        error = check_tensor(spec, names)
        if error is not None:
            return Failure(error)
        names.update(spec.names)
        before = cursor
        cursor, chunks = place_tensor(cursor, spec, bucket_bytes)
        placements.append(Placement(spec, chunks))
        if cursor.bucket != before.bucket:
            filled_bytes.append(_closed_bytes(before, chunks[0], bucket_bytes))
            filled_bytes.extend([bucket_bytes] * (cursor.bucket - before.bucket - 1))
    if placements:
        filled_bytes.append(cursor.filled_bytes)
    return Success(
        BucketPlan(
            bucket_bytes=bucket_bytes,
            placements=tuple(placements),
            filled_bytes=tuple(filled_bytes),
        )
    )


def measure_stream(specs: Iterable[TensorSpec], bucket_bytes: int) -> Result[StreamSize, PlanError]:
    """How much a stream moves, in a time that does not grow with the sizes of its tensors.

    Args:
        specs: As for `plan_buckets`, as is `bucket_bytes`.
    """
    unaligned = check_bucket_bytes(bucket_bytes)
    if unaligned is not None:
        return Failure(unaligned)
    cursor = Cursor()
    names: set[str] = set()
    payload = moved = fullest = largest = 0
    for spec in specs:
        error = check_tensor(spec, names)
        if error is not None:
            return Failure(error)
        names.update(spec.names)
        before = cursor
        cursor, first = place_first(cursor, spec, bucket_bytes)
        size = spec.tensor_bytes
        payload, largest = payload + size, max(largest, size)
        if cursor.bucket != before.bucket:
            full = cursor.bucket - before.bucket - 1
            closed = _closed_bytes(before, first, bucket_bytes)
            moved += closed + full * bucket_bytes
            fullest = max(fullest, bucket_bytes if full else closed)
    return Success(
        StreamSize(
            payload_bytes=payload,
            moved_bytes=moved + cursor.filled_bytes,
            buckets=cursor.bucket + 1 if names else 0,
            fullest_bucket_bytes=max(fullest, cursor.filled_bytes),
            last_bucket_bytes=cursor.filled_bytes,
            largest_bytes=largest,
        )
    )


def _closed_bytes(before: Cursor, first: Chunk, bucket_bytes: int) -> int:
    """How far the bucket of `before` is filled once a tensor goes on, or begins, in the next."""
    return bucket_bytes if first.bucket == before.bucket else before.filled_bytes
