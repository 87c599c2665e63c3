"""Reads of another process's memory, cut into batches and hashed as they come.

Rules kept here: only runs that lie inside an offered tensor and inside a parameter are read, in the
order in which they are hashed; what is hashed is what has arrived, and nothing else reads it first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import torch
import xxhash

_EVERYTHING: Final = ctypes.c_char * (1 << 62)


class Strip(NamedTuple):
    """Equally long runs of a tensor, and where they are read to."""

    source: int
    """First byte of the first run in the tensor."""
    parameter: str
    """What it is read into."""
    target: int
    """Where in that it is read to."""
    address: int
    """Where that is."""
    run_bytes: int
    runs: int
    source_stride: int
    target_stride: int


class Read(NamedTuple):
    """One strip of an offered tensor to read."""

    tensor: int
    """First byte of the tensor, in the sender's address space."""
    strip: Strip
    checksum: xxhash.xxh3_64 | None
    """Takes what has been read, in order; None without checksums."""
    on_device: torch.Tensor | None
    """The bytes of the parameter, if they are not in the host's memory."""


class UnfinishedRead(Protocol):
    """A batch that is being read."""

    def is_done(self) -> bool:
        """Whether all of it has arrived.

        Raises:
            TransferError: it will not.
        """

    async def finish(self) -> None:
        """Wait until all of it has arrived; it raises what `is_done` does."""

    def end(self) -> None:
        """Let nothing arrive any more."""


@dataclass
class ReadBatch:
    """Runs that are read at once.

    Attributes:
        remote: address and bytes of each, in turn, at the sender.
        local: the same here.
        hashed: what is to be taken by which checksum when it has arrived.
    """

    remote: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    total_bytes: int = 0
    hashed: list[tuple[xxhash.xxh3_64, memoryview | torch.Tensor]] = field(default_factory=list)

    def add(self, read: Read, source: int, target: int, size: int) -> None:
        """A run: where it begins from the strip's first byte on, there and here."""
        strip = read.strip
        address = strip.address + target
        self.remote += (read.tensor + strip.source + source, size)
        self.local += (address, size)
        self.total_bytes += size
        if read.checksum is not None:
            contents: memoryview | torch.Tensor
            if read.on_device is None:
                contents = memory_at(address, size)
            else:
                first = strip.target + target
                contents = read.on_device[first : first + size]
            self.hashed.append((read.checksum, contents))

    def hash(self) -> None:
        """Let the checksums take what has arrived."""
        for checksum, contents in self.hashed:
            checksum.update(on_host(contents) if isinstance(contents, torch.Tensor) else contents)


def batches(reads: Iterable[Read], slice_bytes: int, most_runs: int) -> Iterator[ReadBatch]:
    """The reads in batches of no more than so many bytes and runs."""
    batch = ReadBatch()
    for read in reads:
        for source, target, size in _runs(read.strip, slice_bytes):
            if batch.total_bytes + size > slice_bytes or len(batch.remote) == 2 * most_runs:
                yield batch
                batch = ReadBatch()
            batch.add(read, source, target, size)
    if batch.remote:
        yield batch


def _runs(strip: Strip, slice_bytes: int) -> Iterable[tuple[int, int, int]]:
    """A strip in runs: where each begins from the first one on, there and here, and its bytes."""
    if strip.runs == 1 and strip.run_bytes <= slice_bytes:
        return ((0, 0, strip.run_bytes),)
    return (
        (
            run * strip.source_stride + first,
            run * strip.target_stride + first,
            min(slice_bytes, strip.run_bytes - first),
        )
        for run in range(strip.runs)
        for first in range(0, strip.run_bytes, slice_bytes)
    )


def memory_at(address: int, size: int) -> memoryview:
    """This process's memory from an address on, which the caller keeps from being freed.

    A tensor's own way to its bytes takes ten times as long.
    """
    return memoryview(_EVERYTHING.from_address(address))[:size]


def on_host(contents: torch.Tensor) -> memoryview:
    """A copy of bytes that are in a device's memory.

    Args:
        contents: uint8.
    """
    copied: memoryview = contents.contiguous().view(-1).cpu().numpy().data
    return copied
