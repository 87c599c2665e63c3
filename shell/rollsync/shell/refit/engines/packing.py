"""Tensors into buckets, and back: what the bucket plan says, carried out on memory.

Rules kept here: where a piece lies is decided by `rollsync.pure.refit`, tensor by tensor; what is
sent is a tensor's logical contents, whatever its strides; and a received stream is checked against
the announcements as it comes (order, offsets, coverage), before any byte of it is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from rollsync.pure.refit.control import Alias, Piece
from rollsync.pure.refit.errors import TensorNamedTwice
from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.weights import dtype_name


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


class TypedBuffer:
    """A bucket's bytes as tensors of any dtype.

    The view of all of it in a dtype is made once: it costs more than all else about a small tensor.

    Args:
        buffer: `(bucket_bytes,)` uint8; bucket_bytes is a multiple of every element size.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], start: int, end: int
    ) -> torch.Tensor:
        """The bytes from `start` to `end` as they lie, of that dtype and shape."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.buffer.view(dtype)
        size = dtype.itemsize
        flat = view[start // size : end // size]
        return flat if len(shape) == 1 else flat.view(shape)


@dataclass(frozen=True)
class Part:
    """One chunk of one tensor, to be copied into its bucket."""

    bucket: int
    piece: Piece
    tensor: torch.Tensor

    def copy_into(self, bucket: TypedBuffer) -> None:
        """Copy the chunk's bytes to its offset in its bucket."""
        if not self.piece.chunk_bytes:
            return
        tensor, start = self.tensor, self.piece.offset
        end = start + self.piece.chunk_bytes
        if self.piece.chunk_bytes == tensor.nbytes:
            bucket.tensor(tensor.dtype, tensor.shape, start, end).copy_(tensor)
            return
        target = bucket.buffer[start:end]
        flat = self.tensor.contiguous().view(-1).view(torch.uint8)
        begin = self.piece.chunk_offset
        target.copy_(flat[begin : begin + self.piece.chunk_bytes])


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
            tensor = tensor.contiguous()
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
    """Rebuilds the tensors of one stream from its buckets.

    Args:
        bucket_bytes: size of a bucket, as the sender has it.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._cursor = Cursor()
        self._names: set[str] = set()
        self._unfinished: _Unfinished | None = None
        self._assembly = _Assembly()
        self.tensors = 0
        self.payload_bytes = 0

    def batch(
        self,
        bucket: int,
        pieces: tuple[Piece, ...],
        aliases: tuple[Alias, ...],
        buffer: torch.Tensor,
    ) -> Batch:
        """The tensors that are whole with this bucket, each also under its further names: views of
        `buffer` where one chunk has all.

        Raises:
            StreamError: the pieces are not those that the packing rules put there, or an alias is
                of no tensor that is whole with this bucket.
        """
        whole: Batch = []
        further: dict[str, list[str]] = {}
        for alias in aliases:
            further.setdefault(alias.tensor, []).append(alias.name)
        typed = TypedBuffer(buffer)
        for piece in pieces:
            if piece.chunk_offset == 0:
                self._begin(piece)
            unfinished = self._unfinished
            if unfinished is None or not unfinished.expects(bucket, piece):
                raise StreamError(
                    f"tensor {piece.name!r}: a chunk at byte {piece.chunk_offset} of bucket"
                    f" {bucket} is out of place"
                )
            done = unfinished.take(typed)
            if done is not None:
                self._unfinished = None
                self.tensors += 1
                self.payload_bytes += done.nbytes
                whole.append((piece.name, done))
                for name in further.pop(piece.name, ()):
                    _take_name(name, self._names)
                    whole.append((name, done))
        for tensor, names in further.items():
            raise StreamError(f"{names[0]!r} is named for {tensor!r}, which is not in its bucket")
        return whole

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
        self._unfinished = _Unfinished(spec, chunks, self._assembly)


def _take_name(name: str, names: set[str]) -> None:
    if name in names:
        raise StreamError(describe(TensorNamedTwice(tensor=name, aliases=())))
    names.add(name)


class _Unfinished:
    """A tensor of which chunks are still to come, where the packing rules put them."""

    def __init__(self, spec: TensorSpec, chunks: tuple[Chunk, ...], assembly: _Assembly) -> None:
        self.spec = spec
        self._chunks = chunks
        self._assembly = assembly
        self._taken = 0
        self._assembled: torch.Tensor | None = None

    def expects(self, bucket: int, piece: Piece) -> bool:
        """Whether `piece` is the next chunk of this tensor."""
        chunk = self._chunks[self._taken]
        return (
            piece.name == self.spec.name
            and piece.shape == self.spec.shape
            and piece.dtype == self.spec.dtype
            and chunk == Chunk(bucket, piece.offset, piece.chunk_offset, piece.chunk_bytes)
        )

    def take(self, bucket: TypedBuffer) -> torch.Tensor | None:
        """The tensor, if its next chunk, which lies in `bucket`, is its last."""
        chunk = self._chunks[self._taken]
        self._taken += 1
        dtype = dtype_of(self.spec.dtype)
        if len(self._chunks) == 1:
            if not chunk.chunk_bytes:
                return torch.empty(self.spec.shape, dtype=dtype)
            end = chunk.offset + chunk.chunk_bytes
            return bucket.tensor(dtype, self.spec.shape, chunk.offset, end)
        if self._assembled is None:
            self._assembled = self._assembly.memory(self.spec.tensor_bytes)
        end = chunk.chunk_offset + chunk.chunk_bytes
        self._assembled[chunk.chunk_offset : end].copy_(
            bucket.buffer[chunk.offset : chunk.offset + chunk.chunk_bytes]
        )
        if self._taken < len(self._chunks):
            return None
        return self._assembled.view(dtype).view(self.spec.shape)


class _Assembly:
    """Memory to put chunks together in, used again and again: new pages cost as much as a copy.

    A tensor is begun while the one before it, whose last chunk came with the same bucket, is still
    to be loaded; the one before that is loaded. So two memories take turns.
    """

    def __init__(self) -> None:
        self._current = torch.empty(0, dtype=torch.uint8)
        self._previous = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """`(size,)` uint8, until the second call after this."""
        self._current, self._previous = self._previous, self._current
        if len(self._current) < size:
            self._current = torch.empty(size, dtype=torch.uint8)
        return self._current[:size]
