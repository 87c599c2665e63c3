"""Tensors into buckets: what the bucket plan says, carried out on memory; see `unpacking` for back.

Rules kept here: where a piece lies is decided by `rollsync.pure.refit`, tensor by tensor; and what
is sent is a tensor's logical contents, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from rollsync.pure.refit import Cursor, TensorSpec, check_tensor, describe, place_tensor
from rollsync.pure.refit.control import Alias, Piece
from rollsync.pure.refit.errors import TensorNamedTwice
from rollsync.shell.refit.engines.errors import StreamError
from rollsync.shell.refit.engines.rings import StreamRing, is_plain
from rollsync.shell.refit.weights import dtype_name

SLICE_BYTES: Final = 256 * 1024
"""How much is copied, then hashed, at a time: a part of what a core's own cache holds."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What `tensor` is, in pure's words."""
    return TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))


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


class PlacedChunk(NamedTuple):
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

    def chunks(self, name: str, tensor: torch.Tensor) -> Iterator[PlacedChunk]:
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
            yield PlacedChunk(chunk.bucket, piece, tensor)

    def also_named(self, alias: str, tensor: str) -> Alias:
        """A further name of a tensor that was placed.

        Raises:
            StreamError: the name came before.
        """
        take_name(alias, self._names)
        return Alias(name=alias, tensor=tensor)


def take_name(name: str, names: set[str]) -> None:
    """Add a name to those of a stream.

    Raises:
        StreamError: it is there already.
    """
    if name in names:
        raise StreamError(describe(TensorNamedTwice(tensor=name, aliases=())))
    names.add(name)
