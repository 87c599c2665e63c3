"""A ring of transfer buffers as tensors, and the memory for tensors that it cannot hold.

Rule kept here: where a position of a stream lies is decided by `rollsync.pure.refit.ring`; here it
becomes bytes of a tensor, and a tensor's bytes become a tensor again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from rollsync.pure.refit.ring import Ring
from rollsync.shell.refit.engines.mapping import MappedMemory, anonymous_memory


class TypedBuffer:
    """Bytes as tensors of any dtype.

    The view of all of them in a dtype is made once: it costs more than all else about a small
    tensor.

    Args:
        buffer: `(n,)` uint8; n is a multiple of every element size.
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
class Buffers:
    """The transfer buffers of a worker, equally large and one behind the other.

    Attributes:
        memory: `(count * buffer_bytes,)` uint8, or twice as long when it is mirrored: the second
            half is the first once more.
        buffer_bytes: size of each, a multiple of 256.
        count: how many.
        mapped: what is mapped there; None where the memory is torch's own, which goes with the
            last tensor.
    """

    memory: torch.Tensor
    buffer_bytes: int
    count: int
    mapped: MappedMemory | None = None

    @classmethod
    def of(cls, mapped: MappedMemory, buffer_bytes: int, count: int) -> Buffers:
        """Those in memory that is mapped."""
        return cls(mapped.tensor, buffer_bytes, count, mapped)

    @classmethod
    def none(cls) -> Buffers:
        """Those of a worker that has given them back."""
        return cls(torch.empty(0, dtype=torch.uint8), 0, 0)

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return self.count * self.buffer_bytes

    def release(self) -> None:
        """Give the memory back."""
        if self.mapped is not None:
            self.mapped.release()


class StreamRing:
    """The buckets of one stream in its share of the buffers.

    Args:
        buffers: all of them.
        first_byte: where in them this stream's buckets begin.
        bucket_bytes: size of a bucket.
    """

    def __init__(self, buffers: Buffers, first_byte: int, bucket_bytes: int) -> None:
        own = buffers.count * bucket_bytes
        mirrored = own == buffers.size < len(buffers.memory)
        self.ring = Ring(bucket_bytes=bucket_bytes, buckets=buffers.count, mirrored=mirrored)
        self.first_byte = first_byte
        self.device = buffers.memory.device
        end = len(buffers.memory) if mirrored else first_byte + own
        memory = buffers.memory[first_byte:end]
        self._typed = TypedBuffer(memory)
        self._host = _host_view(memory)

    def place(self, position: int) -> int:
        """The byte of the buffers at which a position lies."""
        return self.first_byte + self.ring.place(position)

    def bytes(self, position: int, size: int) -> torch.Tensor:
        """`(size,)` uint8: what lies there. No further than the end of its bucket, unless
        `Ring.holds` it."""
        start = self.ring.place(position)
        return self._typed.buffer[start : start + size]

    def host_bytes(self, position: int, size: int) -> memoryview:
        """What lies there, for the host; a copy if that is in a device's memory."""
        if self._host is None:
            copied: memoryview = self.bytes(position, size).cpu().numpy().data
            return copied
        start = self.ring.place(position)
        return self._host[start : start + size]

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], position: int, size: int
    ) -> torch.Tensor:
        """What lies there, as a tensor; see `bytes`."""
        start = self.ring.place(position)
        return self._typed.tensor(dtype, shape, start, start + size)


class Assembly:
    """Memory in which one tensor after the other that the ring cannot hold is put together.

    It is kept from stream to stream: new pages cost more than the copies into them.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        """Where the tensor is, from its first byte on."""
        self._mapped: MappedMemory | None = None
        self._host: memoryview | None = None

    def reserve(self, size: int, device: torch.device) -> None:
        """Begin a tensor of `size` bytes; the one before is gone."""
        if len(self.memory) < size or self.memory.device != device:
            # The old memory goes first, so that both are never there at once.
            self.release()
            self.memory = self._make(size, device)
            self._host = _host_view(self.memory)

    def _make(self, size: int, device: torch.device) -> torch.Tensor:
        """New memory."""
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        self._mapped = anonymous_memory(size)
        return self._mapped.tensor

    @property
    def can_be_read_into(self) -> bool:
        """Whether a receiver can read what is not in its buffers to here."""
        return False

    def host_bytes(self, start: int, size: int) -> memoryview:
        """What lies there, for the host; a copy if that is in a device's memory."""
        if self._host is None:
            copied: memoryview = self.memory[start : start + size].cpu().numpy().data
            return copied
        return self._host[start : start + size]

    def put(self, start: int, ring: StreamRing, position: int, size: int) -> None:
        """Copy `size` bytes that lie at `position` to where the tensor's from `start` on are."""
        if self._host is not None:
            self._host[start : start + size] = ring.host_bytes(position, size)
        else:
            self.memory[start : start + size].copy_(ring.bytes(position, size))

    def release(self) -> None:
        """Give the memory back."""
        if self._mapped is not None:
            self._mapped.release()
            self._mapped = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._host = None


def _host_view(memory: torch.Tensor) -> memoryview | None:
    """Its bytes where they are in the host's memory."""
    return memory.numpy().data if memory.is_cpu else None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is its contents in row-major order."""
    return (
        tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.nbytes > 0
    )


class RunningChecksum:
    """XXH3, 64 bits, of a stretch of a ring, taken while the bytes are still in the cache.

    Args:
        ring: where they lie.
        position: where the stretch begins.
    """

    def __init__(self, ring: StreamRing, position: int) -> None:
        self._ring = ring
        self._hash = xxhash.xxh3_64()
        self.position = position
        """Up to where the bytes have been taken."""

    def take(self, position: int) -> None:
        """Take what lies before `position`, all in one bucket."""
        self._hash.update(self._ring.host_bytes(self.position, position - self.position))
        self.position = position

    def hexdigest(self) -> str:
        """In hexadecimal."""
        return self._hash.hexdigest()
