"""Tensors into buckets, and back: what the bucket plan says, carried out on memory.

Rules kept here: where a piece lies is decided by `rollsync.pure.refit`, tensor by tensor; what is
sent is a tensor's logical contents, whatever its strides; and a received stream is checked against
the announcements as it comes (order, offsets, coverage), before any byte of it is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from rollsync.pure.refit import (
    DTYPE_BYTES,
    Chunk,
    Cursor,
    TensorSpec,
    check_tensor,
    describe,
    place_tensor,
)
from rollsync.pure.refit.control import Alias, BucketFilled, Piece
from rollsync.pure.refit.errors import TensorNamedTwice
from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.engines.rings import Assembly, StreamRing, is_plain
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.weights import dtype_name

SLICE_BYTES: Final = 256 * 1024
"""How much is copied, then hashed, at a time: a part of what a core's own cache holds."""


class StreamError(RefitError):
    """A stream that breaks its own rules: a name twice, a type unknown, bytes missing."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What `tensor` is, in pure's words."""
    return TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        StreamError: torch has none.
    """
    dtype = getattr(torch, name, None) if name in DTYPE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise StreamError(f"there is no dtype {name!r}", remedy="run the same torch on both sides")
    return dtype


class SlicedCopy:
    """A large chunk that is copied in slices, so that each is hashed while it is in the cache.

    Args:
        source: `(n,)` bytes: the chunk's.
        target: `(n,)` bytes: its place.
    """

    __slots__ = ("_source", "_target", "ends")

    def __init__(self, source: memoryview, target: memoryview) -> None:
        self._source = source
        self._target = target
        size = len(source)
        self.ends: Sequence[int] = (*range(SLICE_BYTES, size, SLICE_BYTES), size)
        """Where in the chunk the slices end."""

    def to(self, begin: int, end: int) -> None:
        """Copy the slice from `begin` to `end`."""
        self._target[begin:end] = self._source[begin:end]


class WholeCopy:
    """A chunk that is copied at once.

    Args:
        source: what is copied.
        target: its place, of the same type and shape.
        size: bytes of it.
    """

    __slots__ = ("_source", "_target", "ends")

    def __init__(self, source: torch.Tensor, target: torch.Tensor, size: int) -> None:
        self._source = source
        self._target = target
        self.ends: Sequence[int] = (size,)
        """Where in the chunk its only slice ends."""

    def to(self, begin: int, end: int) -> None:
        """Copy all of it, which is from `begin` to `end`."""
        if begin < end:
            self._target.copy_(self._source)


class Part(NamedTuple):
    """One chunk of one tensor, to be copied to its place."""

    bucket: int
    piece: Piece
    tensor: torch.Tensor

    def copy_to(self, ring: StreamRing) -> SlicedCopy | WholeCopy:
        """How the chunk gets to its place in `ring`: in slices if it is large and its bytes lie in
        order in the host's memory, on both sides."""
        piece, tensor = self.piece, self.tensor
        size, first = piece.chunk_bytes, piece.chunk_offset
        start = ring.ring.position(self.bucket, piece.offset)
        is_on_host = ring.device.type == "cpu" and tensor.is_cpu
        if size > SLICE_BYTES and is_on_host and is_plain(tensor):
            flat: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
            return SlicedCopy(flat[first : first + size], ring.host_bytes(start, size))
        if size == tensor.nbytes:
            return WholeCopy(tensor, ring.tensor(tensor.dtype, tensor.shape, start, size), size)
        chunk = tensor.contiguous().view(-1).view(torch.uint8)[first : first + size]
        return WholeCopy(chunk, ring.bytes(start, size), size)


class StreamPacker:
    """Places the tensors of one stream, one by one.

    Args:
        bucket_bytes: size of a bucket.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._cursor = Cursor()
        self._names: set[str] = set()
        self.tensors = 0
        self.payload_bytes = 0

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[Part]:
        """The chunks of the next tensor, in order.

        Raises:
            StreamError: the name came before, or the dtype cannot be sent.
        """
        spec = spec_of(name, tensor)
        mistake = check_tensor(spec, self._names)
        if mistake is not None:
            raise StreamError(describe(mistake))
        self._names.add(name)
        self._cursor, chunks = place_tensor(self._cursor, spec, self._bucket_bytes)
        self.tensors += 1
        self.payload_bytes += tensor.nbytes
        if len(chunks) > 1:
            # A tensor in several chunks is laid out once, not once per chunk.
            tensor = tensor.contiguous().resolve_conj().resolve_neg()
        for chunk in chunks:
            piece = Piece(
                name=name,
                shape=spec.shape,
                dtype=spec.dtype,
                offset=chunk.offset,
                chunk_offset=chunk.chunk_offset,
                chunk_bytes=chunk.chunk_bytes,
            )
            yield Part(chunk.bucket, piece, tensor)

    def also_named(self, alias: str, tensor: str) -> Alias:
        """A further name of a tensor that was placed.

        Raises:
            StreamError: the name came before.
        """
        _take_name(alias, self._names)
        return Alias(name=alias, tensor=tensor)


class StreamUnpacker:
    """Rebuilds the tensors of one stream from the parts of its buckets.

    Args:
        ring: where the parts lie.
        assembly: memory for tensors that the ring cannot hold.
    """

    def __init__(self, ring: StreamRing, assembly: Assembly) -> None:
        self._ring = ring
        self._assembly = assembly
        self._bucket_bytes = ring.ring.bucket_bytes
        self._cursor = Cursor()
        self._names: set[str] = set()
        self._unfinished: _Unfinished | None = None
        self._end = 0
        self.tensors = 0
        self.payload_bytes = 0

    @property
    def is_assembling(self) -> bool:
        """Whether a tensor is under way that the ring cannot hold."""
        return self._unfinished is not None and not self._unfinished.stays

    def absorb(self, position: int) -> None:
        """Copy away what has come, before `position`, of a tensor that the ring cannot hold.

        Of one tensor only: the next must not be begun before the batch with this one is loaded.
        """
        unfinished = self._unfinished
        if unfinished is not None and not unfinished.stays:
            unfinished.absorb(position, self._ring, self._assembly)

    def take(self, part: BucketFilled) -> Batch:
        """The tensors that are whole with this part, each also under its further names: views of
        the ring, except for one that the ring cannot hold.

        Raises:
            StreamError: the pieces are not those that the packing rules put there, or an alias is
                of no tensor that is whole with this part.
        """
        whole: Batch = []
        further: dict[str, list[str]] = {}
        for alias in part.aliases:
            further.setdefault(alias.tensor, []).append(alias.name)
        begin = self._ring.ring.position(part.bucket, part.begin_bytes)
        end = self._ring.ring.position(part.bucket, part.filled_bytes)
        if begin != self._end and self._unfinished is not None:
            raise StreamError(f"tensor {self._unfinished.spec.name!r} has a hole")
        self._end = end
        self._finish(end, whole, further)
        for piece in part.pieces:
            if piece.chunk_offset == 0:
                self._begin(piece)
            unfinished = self._unfinished
            if (
                unfinished is None
                or piece.offset > part.filled_bytes
                or not unfinished.expects(part.bucket, piece)
            ):
                raise StreamError(
                    f"tensor {piece.name!r}: a chunk at byte {piece.chunk_offset} of bucket"
                    f" {part.bucket} is out of place"
                )
            self._finish(end, whole, further)
        for tensor, names in further.items():
            raise StreamError(f"{names[0]!r} is named for {tensor!r}, which is not whole with it")
        return whole

    def settle(self) -> int:
        """What the sender may fill again once the tensors of `take` are loaded: everything before
        the position that is answered."""
        self.absorb(self._end)
        unfinished = self._unfinished
        return unfinished.start if unfinished is not None and unfinished.stays else self._end

    def check_complete(self) -> None:
        """Raise `StreamError` if the last tensor is not whole."""
        if self._unfinished is not None:
            raise StreamError(f"tensor {self._unfinished.spec.name!r} ended before its last byte")

    def _begin(self, piece: Piece) -> None:
        spec = TensorSpec(piece.name, piece.shape, piece.dtype)
        mistake = check_tensor(spec, self._names)
        if mistake is not None:
            raise StreamError(describe(mistake))
        self.check_complete()
        self._names.add(piece.name)
        self._cursor, chunks = place_tensor(self._cursor, spec, self._bucket_bytes)
        start = self._ring.ring.position(chunks[0].bucket, chunks[0].offset)
        size = piece.chunk_bytes if len(chunks) == 1 else spec.tensor_bytes
        stays = len(chunks) == 1 or self._ring.ring.holds(start, size)
        self._unfinished = _Unfinished(spec, chunks, start, size, stays)

    def _finish(self, end: int, whole: Batch, further: dict[str, list[str]]) -> None:
        """Add the tensor that is under way if all of it lies before `end`."""
        unfinished = self._unfinished
        if unfinished is None or not unfinished.is_whole(end):
            return
        done = unfinished.tensor(self._ring, self._assembly)
        self._unfinished = None
        self.tensors += 1
        self.payload_bytes += unfinished.size
        name = unfinished.spec.name
        whole.append((name, done))
        if further:
            for alias in further.pop(name, ()):
                _take_name(alias, self._names)
                whole.append((alias, done))


def _take_name(name: str, names: set[str]) -> None:
    if name in names:
        raise StreamError(describe(TensorNamedTwice(tensor=name, aliases=())))
    names.add(name)


class _Unfinished:
    """A tensor of which something is still to come, at the place that the packing rules give it."""

    __slots__ = ("_absorbed", "_chunks", "_taken", "size", "spec", "start", "stays")

    def __init__(
        self, spec: TensorSpec, chunks: tuple[Chunk, ...], start: int, size: int, stays: bool
    ) -> None:
        self.spec = spec
        self.start = start
        self.size = size
        self.stays = stays
        """Whether it is left in the ring until it is whole."""
        self._chunks = chunks
        self._taken = 0
        self._absorbed = start

    def expects(self, bucket: int, piece: Piece) -> bool:
        """Whether `piece` is the next chunk of this tensor; if so, it is taken for announced."""
        if self._taken == len(self._chunks):
            return False
        chunk, spec = self._chunks[self._taken], self.spec
        self._taken += 1
        return (
            chunk.bucket == bucket
            and chunk.offset == piece.offset
            and chunk.chunk_offset == piece.chunk_offset
            and chunk.chunk_bytes == piece.chunk_bytes
            and piece.name == spec.name
            and piece.shape == spec.shape
            and piece.dtype == spec.dtype
        )

    def is_whole(self, end: int) -> bool:
        """Whether all of it was announced and lies before `end`."""
        return self._taken == len(self._chunks) and self.start + self.size <= end

    def absorb(self, position: int, ring: StreamRing, assembly: Assembly) -> None:
        """Copy what lies before `position` to where this tensor is put together."""
        end = min(position, self.start + self.size)
        begin = self._absorbed
        if begin == self.start:
            # The tensor before this one may have been there until now.
            assembly.reserve(self.size, ring.device)
        if begin < end:
            assembly.put(begin - self.start, ring, begin, end - begin)
            self._absorbed = end

    def tensor(self, ring: StreamRing, assembly: Assembly) -> torch.Tensor:
        """All of it."""
        dtype = dtype_of(self.spec.dtype)
        if not self.size:
            return torch.empty(self.spec.shape, dtype=dtype, device=ring.device)
        if self.stays:
            return ring.tensor(dtype, self.spec.shape, self.start, self.size)
        self.absorb(self.start + self.size, ring, assembly)
        return assembly.memory[: self.size].view(dtype).view(self.spec.shape)
