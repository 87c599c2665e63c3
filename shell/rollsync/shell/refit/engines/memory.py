"""Transfer buffers in anonymous shared memory.

Rule kept here: the memory has no name in any file system; it lives as long as a process has it
open, so that a killed job leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys

import psutil
import torch

from rollsync.pure.refit.control import Hello
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from rollsync.shell.refit.engines.mapping import map_file, reserve_file
from rollsync.shell.refit.engines.rings import Assembly, Buffers
from rollsync.shell.refit.errors import RefitConfigurationError, RefitError

HAND_OVER_TIMEOUT_S = 5.0
"""How long a sender that was welcomed may take to hand its buffers over."""
_MOST_BUFFERS = 16
_REMEDY = "lower update_weights_bucket_memory_ratio, or free memory"


class BufferAllocationError(RefitError):
    """A transfer buffer could not be reserved; none stays reserved."""


def check_shared_memory(backend: str) -> None:
    """Raise `RefitConfigurationError` where this system has no memory to share, as that engine
    does."""
    if not sys.platform.startswith("linux"):
        raise RefitConfigurationError(
            f"the {backend} engine needs Linux (memfd and abstract sockets)",
            remedy="use the nixl engine on this system",
        )


class SharedBuffers:
    """Equal buffers, one behind the other, mapped into this process: a sender's own, or as a
    receiver sees them.

    Args:
        file_descriptor: the memory file that they are; this object closes it.
        count: how many.
        buffer_bytes: size of each.
        memory_id: names them among all that there ever are.
    """

    def __init__(self, file_descriptor: int, count: int, buffer_bytes: int, memory_id: str) -> None:
        self.memory_id = memory_id
        self._file_descriptor = file_descriptor
        try:
            mapped = map_file(file_descriptor, count * buffer_bytes)
        except BaseException:
            os.close(file_descriptor)
            raise
        self.buffers = Buffers.of(mapped, buffer_bytes, count)

    @classmethod
    def allocate(cls, count: int, buffer_bytes: int) -> SharedBuffers:
        """Reserve `count` new buffers.

        Raises:
            BufferAllocationError: there is not enough memory.
        """
        return cls(reserve_buffers(count, buffer_bytes), count, buffer_bytes, secrets.token_hex(16))

    async def hand_over(self, channel: ControlChannel) -> None:
        """Send the files themselves; the one byte that carries them cannot block."""
        try:
            socket.send_fds(channel.connection, [b"m"], [self._file_descriptor])
        except OSError as error:
            raise channel.lost() from error

    async def serve(self) -> None:
        """Nothing to do: receivers read the memory themselves."""

    def progress(self) -> None:
        """Let another process have the core that this one waits on."""
        os.sched_yield()

    def start(
        self, channel: ControlChannel, first_byte: int, size: int, target: torch.Tensor | None
    ) -> bool:
        """Nothing to do: what the sender has packed is there."""
        return False

    async def fetch(self, channel: ControlChannel, first_byte: int) -> None:
        """Nothing to do: see `start`."""

    def release(self) -> None:
        """Close the file and unmap it."""
        if self._file_descriptor >= 0:
            os.close(self._file_descriptor)
            self._file_descriptor = -1
        self.buffers.release()
        self.buffers = Buffers.none()


class SharedMedium:
    """The shared buffers that a receiver has mapped: the newest sender's only."""

    own: None = None
    """Nothing is read into other buffers."""

    def __init__(self) -> None:
        self.assembly = Assembly()
        self._mapped: SharedBuffers | None = None

    def knows(self, memory_id: str) -> bool:
        """Whether they are mapped already."""
        return self._mapped is not None and self._mapped.memory_id == memory_id

    async def take_over(self, channel: ControlChannel, hello: Hello) -> SharedBuffers:
        """Map the buffers whose files the sender sends."""
        if self._mapped is not None and self.knows(hello.memory_id):
            return self._mapped
        self._unmap()
        descriptors = await _descriptors(channel)
        sizes = [os.fstat(each).st_size for each in descriptors]
        if len(sizes) != 1 or sizes[0] < hello.buffers * hello.buffer_bytes:
            for each in descriptors:
                os.close(each)
            raise PeerRefused(
                f"{channel.peer} announced {hello.buffers} buffers of"
                f" {hello.buffer_bytes} bytes and handed over {sizes}",
                worker=channel.worker,
                stage="connected",
                remedy="make sure that both ends run one version of rollsync",
            )
        self._mapped = SharedBuffers(
            descriptors[0], hello.buffers, hello.buffer_bytes, hello.memory_id
        )
        return self._mapped

    def release(self) -> None:
        """Unmap, and free what tensors were assembled in."""
        self._unmap()
        self.assembly.release()

    def _unmap(self) -> None:
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
            worker=channel.worker,
            stage="connected",
            remedy="see that worker's log for why it ended",
        ) from error
    finally:
        loop.remove_reader(channel.connection)
    return descriptors


def check_free(count: int, buffer_bytes: int) -> None:
    """Raise `BufferAllocationError` if there is not the memory for so many buffers.

    The kernel would not refuse them: it would kill processes for the memory.
    """
    wanted, free = count * buffer_bytes, psutil.virtual_memory().available
    if wanted > free:
        raise BufferAllocationError(
            f"{count} transfer buffers of {buffer_bytes} bytes need {wanted} bytes, and"
            f" {free} are free",
            remedy=_REMEDY,
        )


def reserve_buffers(count: int, buffer_bytes: int) -> int:
    """A memory file for `count` buffers; its descriptor, which the caller closes.

    Raises:
        BufferAllocationError: there is not enough memory.
    """
    check_free(count, buffer_bytes)
    try:
        return reserve_file(count * buffer_bytes)
    except OSError as error:
        raise BufferAllocationError(
            f"{count} transfer buffers of {buffer_bytes} bytes cannot be reserved:"
            f" {error.strerror}",
            remedy=_REMEDY,
        ) from error
