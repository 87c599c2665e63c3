"""Transfer buffers in anonymous shared memory.

Rule kept here: the memory has no name in any file system; it lives as long as a process has it
open, so that a killed job leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
from typing import ClassVar

import psutil
import torch
import xxhash

from rollsync.pure.refit.control import Hello
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from rollsync.shell.refit.errors import RefitError

HAND_OVER_TIMEOUT_S = 5.0
"""How long a sender that was welcomed may take to hand its buffers over."""
_MOST_BUFFERS = 16


class BufferAllocationError(RefitError):
    """A transfer buffer could not be reserved; none stays reserved."""


class SharedBuffers:
    """Equal buffers, mapped into this process: a sender's own, or as a receiver sees them.

    Args:
        file_descriptors: one memory file per buffer; this object closes them.
        buffer_bytes: size of each.
        memory_id: names them among all that there ever are.
    """

    in_place: ClassVar[bool] = True

    def __init__(self, file_descriptors: list[int], buffer_bytes: int, memory_id: str) -> None:
        self.file_descriptors = file_descriptors
        self.memory_id = memory_id
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
        wanted, free = count * buffer_bytes, psutil.virtual_memory().available
        if wanted > free:
            # The kernel would not refuse: it would kill processes for the memory.
            raise BufferAllocationError(
                f"{count} transfer buffers of {buffer_bytes} bytes need {wanted} bytes, and"
                f" {free} are free",
                remedy="lower update_weights_bucket_memory_ratio, or free memory",
            )
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
            return cls(made, buffer_bytes, secrets.token_hex(16))
        except BaseException:
            for each in made:
                os.close(each)
            raise

    async def hand_over(self, channel: ControlChannel) -> None:
        """Send the files themselves; the one byte that carries them cannot block."""
        try:
            socket.send_fds(channel.connection, [b"m"], self.file_descriptors)
        except OSError as error:
            raise channel.lost() from error

    async def serve(self) -> None:
        """Nothing to do: receivers read the memory themselves."""

    def start(
        self, channel: ControlChannel, bucket: int, first_byte: int, filled_bytes: int
    ) -> None:
        """Nothing to do: what the sender has packed is there."""

    async def fetch(
        self, channel: ControlChannel, bucket: int, first_byte: int, filled_bytes: int
    ) -> torch.Tensor:
        """The sender's buffer itself."""
        return self.buffers[bucket % len(self.buffers)][first_byte:]

    def release(self) -> None:
        """Unmap as soon as no tensor uses the memory any more, and close the files."""
        self.buffers.clear()
        for each in self.file_descriptors:
            os.close(each)
        self.file_descriptors.clear()


class SharedMedium:
    """The shared buffers that a receiver has mapped: the newest sender's only."""

    def __init__(self) -> None:
        self._mapped: SharedBuffers | None = None

    def knows(self, memory_id: str) -> bool:
        """Whether they are mapped already."""
        return self._mapped is not None and self._mapped.memory_id == memory_id

    async def take_over(self, channel: ControlChannel, hello: Hello) -> SharedBuffers:
        """Map the buffers whose files the sender sends."""
        if self._mapped is not None and self.knows(hello.memory_id):
            return self._mapped
        self.release()
        descriptors = await _descriptors(channel)
        sizes = [os.fstat(each).st_size for each in descriptors]
        if len(descriptors) != hello.buckets or any(size < hello.bucket_bytes for size in sizes):
            for each in descriptors:
                os.close(each)
            raise PeerRefused(
                f"policy {hello.policy_rank} announced {hello.buckets} buffers of"
                f" {hello.bucket_bytes} bytes and handed over {sizes}",
                rank=channel.rank,
                stage="connected",
                remedy="make sure that both ends run one version of rollsync",
            )
        self._mapped = SharedBuffers(descriptors, hello.bucket_bytes, hello.memory_id)
        return self._mapped

    def release(self) -> None:
        """Unmap."""
        if self._mapped is not None:
            self._mapped.release()
            self._mapped = None


async def _descriptors(channel: ControlChannel) -> list[int]:
    """The files that come with the next byte of a connection."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(channel.connection, ready.set)
    try:
        async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
            await ready.wait()
        carrier, descriptors, _, _ = socket.recv_fds(channel.connection, 1, _MOST_BUFFERS)
        if not carrier:
            raise ConnectionResetError
    except OSError as error:
        # A deadline that has passed is one of these too.
        raise PeerLost(
            f"{channel.peer} did not hand its buffers over",
            rank=channel.rank,
            stage="connected",
            remedy="see that worker's log for why it ended",
        ) from error
    finally:
        loop.remove_reader(channel.connection)
    return descriptors


def bucket_checksum(buffer: torch.Tensor, filled_bytes: int) -> str:
    """XXH3, 64 bits, hexadecimal, of the first `filled_bytes` of a buffer."""
    filled: memoryview = buffer[:filled_bytes].cpu().numpy().data
    return xxhash.xxh3_64_hexdigest(filled)
