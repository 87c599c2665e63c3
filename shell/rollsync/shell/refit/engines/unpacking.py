"""Tensors out of the buckets of one stream; the other way round is `packing`.

A part of a bucket is looked at twice. When it is announced, it is found out what it will bring and
where that will lie; when it has come, that is checked, put together and handed out.

Rules kept here: an announcement is checked against the packing rules (order, offsets, coverage)
before any byte of it is read, in a time that grows with the announcement and not with the tensor
that it is of; and one tensor at a time has the memory in which those are put
together that the ring cannot hold, until the batch with it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import xxhash

from rollsync.pure.refit import (
    DTYPE_BYTES,
    Chunk,
    Cursor,
    TensorSpec,
    check_tensor,
    chunk_after,
    describe,
    place_first,
)
from rollsync.pure.refit.control import BucketFilled, Piece
from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.engines.errors import StreamError
from rollsync.shell.refit.engines.packing import SLICE_BYTES, take_name
from rollsync.shell.refit.engines.rings import Assembly, StreamRing

_MOST_BYTES: Final = 2**63 - 1
"""What torch counts the bytes of a tensor with goes no further."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        StreamError: torch has none.
    """
    dtype = getattr(torch, name, None) if name in DTYPE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise StreamError(f"there is no dtype {name!r}", remedy="run the same torch on both sides")
    return dtype


class Incoming:
    """A tensor that was announced, at the place that the packing rules give it.

    Args:
        spec: what it is.
        chunk: the first of the pieces that it is cut into.
        bucket_bytes: size of a bucket.
        start: the position of its first byte.
        size: bytes of it.
        stays: whether it is left in the ring until it is whole.
    """

    __slots__ = ("_bucket_bytes", "_next", "size", "spec", "start", "stays")

    def __init__(
        self,
        spec: TensorSpec,
        chunk: Chunk,
        bucket_bytes: int,
        start: int,
        size: int,
        *,
        stays: bool,
    ) -> None:
        self.spec = spec
        self.start = start
        self.size = size
        self.stays = stays
        self._next: Chunk | None = chunk
        self._bucket_bytes = bucket_bytes

    @property
    def end(self) -> int:
        """The position behind its last byte."""
        return self.start + self.size

    def take_next(self, bucket: int, piece: Piece) -> bool:
        """Take the next chunk of this tensor for announced; whether `piece` is that one."""
        chunk, spec = self._next, self.spec
        if chunk is None:
            return False
        self._next = chunk_after(chunk, self.size, self._bucket_bytes)
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
        return self._next is None and self.end <= end


class Stretch:
    """Consecutive bytes of a part that have one fate.

    Args:
        begin: the position of the first.
        end: the position behind the last.
        tensor: the tensor that they are of, if the ring cannot hold it; None: they stay there.
    """

    __slots__ = ("begin", "end", "is_in_place", "tensor")

    def __init__(self, begin: int, end: int, tensor: Incoming | None) -> None:
        self.begin = begin
        self.end = end
        self.tensor = tensor
        self.is_in_place = tensor is None
        """Whether they are, or are read to, where their tensor will be whole."""


class AnnouncedPart:
    """What a part of a bucket brings.

    Args:
        announcement: what the sender said of it.
        begin: the position at which it begins.
        end: the position at which it ends.
    """

    __slots__ = ("announcement", "begin", "end", "needed_from", "stretches", "whole")

    def __init__(self, announcement: BucketFilled, begin: int, end: int) -> None:
        self.announcement = announcement
        self.begin = begin
        self.end = end
        self.needed_from = end
        """Before which position nothing is needed once its tensors are loaded."""
        self.whole: list[tuple[str, Incoming]] = []
        """The tensors that are whole with it, each also under its further names."""
        self.stretches: list[Stretch] = []
        """All of its bytes, in order."""


class StreamUnpacker:
    """Rebuilds the tensors of one stream from the parts of its buckets.

    Args:
        ring: where the parts lie.
        assembly: memory for tensors that the ring cannot hold.
    """

    def __init__(self, ring: StreamRing, assembly: Assembly) -> None:
        self._ring = ring
        self._assembly = assembly
        self._assembled: Incoming | None = None
        """Whose that memory is."""
        self._bucket_bytes = ring.ring.bucket_bytes
        self._cursor = Cursor()
        self._names: set[str] = set()
        self._unfinished: Incoming | None = None
        self._end = 0
        self.tensors = 0
        self.payload_bytes = 0

    def expect(self, announcement: BucketFilled) -> AnnouncedPart:
        """What the next part brings.

        Raises:
            StreamError: the pieces are not those that the packing rules put there, or an alias is
                of no tensor that is whole with this part.
        """
        further: dict[str, list[str]] = {}
        for alias in announcement.aliases:
            further.setdefault(alias.tensor, []).append(alias.name)
        ring = self._ring.ring
        begin = ring.position(announcement.bucket, announcement.begin_bytes)
        end = ring.position(announcement.bucket, announcement.filled_bytes)
        if begin != self._end and self._unfinished is not None:
            raise StreamError(f"tensor {self._unfinished.spec.name!r} has a hole")
        self._end = end
        part = AnnouncedPart(announcement, begin, end)
        large = [] if self._unfinished is None or self._unfinished.stays else [self._unfinished]
        self._finish(part, further)
        for piece in announcement.pieces:
            if piece.chunk_offset == 0:
                self._begin(piece)
            unfinished = self._unfinished
            if (
                unfinished is None
                or piece.offset > announcement.filled_bytes
                or not unfinished.take_next(announcement.bucket, piece)
            ):
                raise StreamError(
                    f"tensor {piece.name!r}: a chunk at byte {piece.chunk_offset} of bucket"
                    f" {announcement.bucket} is out of place"
                )
            if not unfinished.stays and piece.chunk_offset == 0:
                large.append(unfinished)
            self._finish(part, further)
        for tensor, names in further.items():
            raise StreamError(f"{names[0]!r} is named for {tensor!r}, which is not whole with it")
        if self._unfinished is not None and self._unfinished.stays:
            part.needed_from = self._unfinished.start
        _divide(part, large)
        return part

    def place_for(self, stretch: Stretch) -> torch.Tensor | None:
        """Where `stretch` is to be read to, before it is; None: to its place in the ring."""
        tensor = stretch.tensor
        if tensor is None or not self._has_room(tensor) or not self._assembly.can_be_read_into:
            return None
        stretch.is_in_place = True
        first = stretch.begin - tensor.start
        return self._assembly.memory[first : first + stretch.end - stretch.begin]

    def gather(self, part: AnnouncedPart, checksum: xxhash.xxh3_64 | None) -> None:
        """Hash what has come, and copy what of it the ring cannot hold while it is at hand."""
        for stretch in part.stretches:
            tensor = stretch.tensor
            if tensor is None or stretch.is_in_place or not self._has_room(tensor):
                if checksum is not None:
                    checksum.update(self._bytes(stretch))
                continue
            step = max(stretch.end - stretch.begin, 1) if checksum is None else SLICE_BYTES
            for position in range(stretch.begin, stretch.end, step):
                size = min(step, stretch.end - position)
                if checksum is not None:
                    checksum.update(self._ring.host_bytes(position, size))
                self._assembly.put(position - tensor.start, self._ring, position, size)
            stretch.is_in_place = True

    def take(self, part: AnnouncedPart) -> Batch:
        """The tensors that are whole with a part which was gathered, each also under its further
        names: views of the ring, except for one that the ring cannot hold."""
        whole: Batch = []
        last: Incoming | None = None
        for name, tensor in part.whole:
            # Further names follow the first one.
            made = whole[-1][1] if tensor is last else self._made(tensor)
            whole.append((name, made))
            last = tensor
        return whole

    def settle(self, part: AnnouncedPart) -> None:
        """The tensors of `take` are loaded: the memory in which one was put together is free for
        the next, which may have begun in the same part."""
        if self._assembled is not None and self._assembled.end <= part.end:
            self._assembled = None
        self.gather(part, None)

    def check_complete(self) -> None:
        """Raise `StreamError` if the last tensor is not whole."""
        if self._unfinished is not None:
            raise StreamError(f"tensor {self._unfinished.spec.name!r} ended before its last byte")

    def _begin(self, piece: Piece) -> None:
        spec = TensorSpec(piece.name, piece.shape, piece.dtype)
        mistake = check_tensor(spec, self._names)
        if mistake is not None:
            raise StreamError(describe(mistake))
        _check_size(spec)
        self.check_complete()
        self._names.add(piece.name)
        self._cursor, chunk = place_first(self._cursor, spec, self._bucket_bytes)
        start = self._ring.ring.position(chunk.bucket, chunk.offset)
        is_one = self._cursor.bucket == chunk.bucket
        size = chunk.chunk_bytes if is_one else spec.tensor_bytes
        stays = is_one or self._ring.ring.holds(start, size)
        self._unfinished = Incoming(spec, chunk, self._bucket_bytes, start, size, stays=stays)

    def _finish(self, part: AnnouncedPart, further: dict[str, list[str]]) -> None:
        """Note that the tensor that is under way is whole if all of it lies in the part."""
        unfinished = self._unfinished
        if unfinished is None or not unfinished.is_whole(part.end):
            return
        self._unfinished = None
        self.tensors += 1
        self.payload_bytes += unfinished.size
        name = unfinished.spec.name
        part.whole.append((name, unfinished))
        if further:
            for alias in further.pop(name, ()):
                take_name(alias, self._names)
                part.whole.append((alias, unfinished))

    def _has_room(self, tensor: Incoming) -> bool:
        """Whether the memory for putting together is this tensor's, now if not before."""
        if self._assembled is None:
            self._assembled = tensor
            try:
                self._assembly.reserve(tensor.size, self._ring.device)
            except (MemoryError, OSError, RuntimeError) as error:
                raise StreamError(
                    f"tensor {tensor.spec.name!r}: there is no memory to put its"
                    f" {tensor.size} bytes together in",
                    remedy="make the buckets larger, or leave this worker more memory",
                ) from error
        return self._assembled is tensor

    def _bytes(self, stretch: Stretch) -> memoryview:
        size = stretch.end - stretch.begin
        if stretch.tensor is not None and stretch.is_in_place:
            return self._assembly.host_bytes(stretch.begin - stretch.tensor.start, size)
        return self._ring.host_bytes(stretch.begin, size)

    def _made(self, tensor: Incoming) -> torch.Tensor:
        """All of a tensor."""
        dtype, shape = dtype_of(tensor.spec.dtype), tensor.spec.shape
        if not tensor.size:
            return torch.empty(shape, dtype=dtype, device=self._ring.device)
        if tensor.stays:
            return self._ring.tensor(dtype, shape, tensor.start, tensor.size)
        return self._assembly.memory[: tensor.size].view(dtype).view(shape)


def _check_size(spec: TensorSpec) -> None:
    """Raise `StreamError` if torch cannot have a tensor of this shape, even without elements."""
    size = DTYPE_BYTES[spec.dtype]
    for length in spec.shape:
        size *= max(length, 1)
        if size > _MOST_BYTES:
            raise StreamError(
                f"tensor {spec.name!r} has more bytes than a tensor can have",
                remedy="run the same rollsync on both sides",
            )


def _divide(part: AnnouncedPart, tensors: Sequence[Incoming]) -> None:
    """Find out which bytes of a part are of tensors that the ring cannot hold.

    Args:
        tensors: those that it has bytes of, in order.
    """
    at = part.begin
    for tensor in tensors:
        if tensor.start < part.end:
            begin = max(tensor.start, at)
            if at < begin:
                part.stretches.append(Stretch(at, begin, None))
            at = min(tensor.end, part.end)
            part.stretches.append(Stretch(begin, at, tensor))
    if at < part.end:
        part.stretches.append(Stretch(at, part.end, None))
