"""Transfer buffers in anonymous shared memory.

Rule kept here: the memory has no name in any file system; it lives as long as a process has it
open, so that a killed job leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os

import torch
import xxhash

from rollsync.shell.refit.errors import RefitError


class BufferAllocationError(RefitError):
    """A transfer buffer could not be reserved; none stays reserved."""


class SharedBuffers:
    """Equal buffers, mapped into this process.

    Args:
        file_descriptors: one memory file per buffer; this object closes them.
        buffer_bytes: size of each.
    """

    def __init__(self, file_descriptors: list[int], buffer_bytes: int) -> None:
        self.file_descriptors = file_descriptors
        self.buffer_bytes = buffer_bytes
        self.buffers: list[torch.Tensor] = [
            torch.frombuffer(mmap.mmap(each, buffer_bytes), dtype=torch.uint8)
            for each in file_descriptors
        ]
        """Each `(buffer_bytes,)` uint8, shared with every process that maps it."""

    @classmethod
    def allocate(cls, count: int, buffer_bytes: int) -> SharedBuffers:
        """Reserve `count` new buffers.

        Raises:
            BufferAllocationError: there is not enough memory.
        """
        made: list[int] = []
        try:
            for index in range(count):
                made.append(os.memfd_create("rollsync", os.MFD_CLOEXEC))
                try:
                    # Reserve now: a page that cannot be had later would be a SIGBUS.
                    os.posix_fallocate(made[-1], 0, buffer_bytes)
                except OSError as error:
                    raise BufferAllocationError(
                        f"transfer buffer {index + 1} of {count} ({buffer_bytes} bytes) cannot be"
                        f" reserved: {error.strerror}",
                        remedy="lower update_weights_bucket_memory_ratio, or free memory",
                    ) from error
            return cls(made, buffer_bytes)
        except BaseException:
            for each in made:
                os.close(each)
            raise

    def release(self) -> None:
        """Unmap as soon as no tensor uses the memory any more, and close the files."""
        self.buffers.clear()
        for each in self.file_descriptors:
            os.close(each)
        self.file_descriptors.clear()


def bucket_checksum(buffer: torch.Tensor, filled_bytes: int) -> str:
    """XXH3, 64 bits, hexadecimal, of the first `filled_bytes` of a host buffer."""
    filled: memoryview = buffer[:filled_bytes].numpy().data
    return xxhash.xxh3_64_hexdigest(filled)
