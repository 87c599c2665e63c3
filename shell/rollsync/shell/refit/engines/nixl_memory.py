"""Transfer buffers that are read over NIXL, on both ends.

A receiver has buffers of its own like the sender's, and reads each part of a bucket to the place
that it has there, so that one part travels while the one before is loaded.

Rule kept here: a read that is under way when a stream ends is ended before its buffer is used
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from rollsync.pure.refit.control import Hello, MemoryOffered
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused, TransferTimeout
from rollsync.shell.refit.engines.large_pages import memory_in_large_pages
from rollsync.shell.refit.engines.mapping import MappedMemory, map_file
from rollsync.shell.refit.engines.media import SenderMemory
from rollsync.shell.refit.engines.memory import check_free, reserve_buffers
from rollsync.shell.refit.engines.nixl_agent import (
    NixlAgent,
    NixlError,
    Read,
    RegistrationError,
    memory_of,
)
from rollsync.shell.refit.engines.rings import Assembly, Buffers

if TYPE_CHECKING:
    from nixl_cu12._api import Registered

SPIN_S = 0.001
"""How long a read is asked for without giving the event loop back."""
PATIENCE_S = 0.02
"""How long a read is asked for before this worker rests between two times."""
PAUSE_S = 0.0002


class RegisteredBuffers:
    """Buffers registered with an agent.

    Args:
        agent: where to.
        buffers: what is registered; this object gives them back.
    """

    def __init__(self, agent: NixlAgent, buffers: Buffers) -> None:
        self.buffers = buffers
        self.memory_id = secrets.token_hex(16)
        self._agent = agent
        try:
            self._registered: Sequence[Registered] = agent.register(
                [buffers.memory[: buffers.size]]
            )
        except BaseException:
            buffers.release()
            raise

    async def hand_over(self, channel: ControlChannel) -> None:
        """Tell a receiver where the buffers are."""
        kind, device = memory_of(self.buffers.memory)
        first = self.buffers.memory.data_ptr()
        await channel.send(
            MemoryOffered(
                agent=self._agent.metadata,
                memory=kind,
                device=device,
                addresses=_addresses(first, self.buffers.count, self.buffers.buffer_bytes),
            )
        )

    async def serve(self) -> None:
        """Answer readers whenever this end waits: some transports need it for every byte, the
        others to connect."""
        while True:
            self.progress()
            await asyncio.sleep(PAUSE_S)

    def progress(self) -> None:
        """Answer readers, and let another process have the core that this one waits on."""
        self._agent.progress()
        os.sched_yield()

    def release(self) -> None:
        """Deregister and free."""
        self._agent.deregister(self._registered)
        self._registered = ()
        self.buffers.release()
        self.buffers = Buffers.none()


def reserve_transfer_buffers(
    count: int, buffer_bytes: int, device: torch.device, *, own: bool
) -> Buffers:
    """New buffers to register.

    On the host, a sender's are in large pages, as a reader of the same host has the kernel look up
    each, and a receiver's are mirrored, where that is possible.

    Args:
        count: how many.
        buffer_bytes: size of each.
        device: the torch device that has them.
        own: whether another worker reads them, and not this one into them.
    """
    size = count * buffer_bytes
    if device.type != "cpu" or torch.cuda.is_available():
        # Host memory that a device copies from or to has to be pinned to be fast.
        pinned = device.type == "cpu"
        memory = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        return Buffers(memory, buffer_bytes, count)
    return Buffers.of(_mapped(count, buffer_bytes, own=own), buffer_bytes, count)


def _mapped(count: int, buffer_bytes: int, *, own: bool) -> MappedMemory:
    if own:
        check_free(count, buffer_bytes)
        return memory_in_large_pages(count * buffer_bytes)
    file = reserve_buffers(count, buffer_bytes)
    try:
        return map_file(file, count * buffer_bytes)
    finally:
        os.close(file)


class RegisteredAssembly(Assembly):
    """Memory in which tensors are put together, registered where it can be: what the ring cannot
    hold of a tensor is then read to there at once.

    Args:
        agent: where to.
    """

    def __init__(self, agent: NixlAgent) -> None:
        super().__init__()
        self._agent = agent
        self._registered: Sequence[Registered] = ()

    @property
    def can_be_read_into(self) -> bool:
        """Whether it is registered."""
        return bool(self._registered)

    def _make(self, size: int, device: torch.device) -> torch.Tensor:
        memory = super()._make(size, device)
        # With little locked memory allowed, there may be enough for the buffers only.
        with contextlib.suppress(RegistrationError):
            self._registered = self._agent.register([memory])
        return memory

    def release(self) -> None:
        """Deregister and free."""
        self._agent.deregister(self._registered)
        self._registered = ()
        super().release()


def _addresses(first: int, count: int, buffer_bytes: int) -> tuple[int, ...]:
    return tuple(first + index * buffer_bytes for index in range(count))


class NixlMedium:
    """A receiver's own buffers, and the one sender whose buffers it knows.

    Args:
        agent: this worker's agent.
        own: this worker's buffers, registered with that agent; this object releases them.
        timeout_s: how long one read may take.
    """

    def __init__(self, agent: NixlAgent, own: SenderMemory, timeout_s: float) -> None:
        self.buffers = own.buffers
        self.assembly: Assembly = RegisteredAssembly(agent)
        self.own: SenderMemory = own
        self._agent = agent
        self._timeout_s = timeout_s
        self._sender: _Sender | None = None
        self._reads: dict[int, Read] = {}

    def knows(self, memory_id: str) -> bool:
        """Whether these are the sender's buffers of the last stream."""
        sender = self._sender
        return (
            sender is not None and sender.memory_id == memory_id and self._agent.knows(sender.agent)
        )

    async def take_over(self, channel: ControlChannel, hello: Hello) -> NixlMedium:
        """Learn where the sender's buffers are, unless they are known."""
        self._end_reads()
        if self.knows(hello.memory_id):
            return self
        self._forget_sender()
        offered, _ = await channel.receive()
        if not isinstance(offered, MemoryOffered):
            raise channel.unexpected(offered)
        own = self.buffers
        first = next(iter(offered.addresses), 0)
        if offered.addresses != _addresses(first, own.count, own.buffer_bytes):
            raise PeerRefused(
                f"{channel.peer} has {len(offered.addresses)} buffers of"
                f" {hello.buffer_bytes} bytes, here there are {own.count} of {own.buffer_bytes}",
                worker=channel.worker,
                stage="connected",
                remedy="create both sides' engines with one bucket size",
            )
        with as_loss(channel):
            # NIXL connects here, and a sender that died since it offered is not there any more.
            agent = self._agent.meet(offered.agent)
        self._sender = _Sender(hello.memory_id, agent, offered)
        return self

    def start(
        self, channel: ControlChannel, first_byte: int, size: int, target: torch.Tensor | None
    ) -> bool:
        """Begin to read into this worker's buffers, or to where a tensor is put together.

        Raises:
            PeerLost: NIXL cannot reach the sender.
        """
        sender = self._sender
        if sender is None or not size:
            return False
        offered = sender.offered
        source = (offered.addresses[0] + first_byte, offered.device, offered.memory)
        if target is None:
            target = self.buffers.memory[first_byte : first_byte + size]
        with as_loss(channel):
            read = self._agent.read(sender.agent, source, target)
            # What is noted is ended, whatever becomes of it.
            self._reads[first_byte] = read
            if not read.is_done():
                return True
        del self._reads[first_byte]
        read.release()
        return False

    async def fetch(self, channel: ControlChannel, first_byte: int) -> None:
        """Wait for the read that was begun there.

        Raises:
            PeerFailed: the sender gave up.
            PeerLost: it is gone, or NIXL cannot reach it.
            TransferTimeout: the read takes too long.
        """
        read = self._reads.get(first_byte)
        if read is not None:
            with as_loss(channel):
                await arrival(channel, read, self._timeout_s)
            del self._reads[first_byte]
            read.release()

    def release(self) -> None:
        """Forget the sender, and give this worker's buffers back."""
        self._end_reads()
        self._forget_sender()
        self.own.release()
        self.buffers = self.own.buffers
        self.assembly.release()

    def _end_reads(self) -> None:
        for read in self._reads.values():
            read.release()
        self._reads.clear()

    def _forget_sender(self) -> None:
        if self._sender is not None:
            name, self._sender = self._sender.agent, None
            self._agent.forget(name)


async def arrival(channel: ControlChannel, read: Read, timeout_s: float) -> None:
    """Wait until a read has come.

    Raises:
        NixlError: it will not.
        PeerFailed, PeerLost, PeerRefused: the sender gave up, or is gone.
        TransferTimeout: it takes too long.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    paused = begun
    while not read.is_done():
        now = loop.time()
        if now - paused < SPIN_S:
            continue
        # This core may be what moves the bytes, so it rests only when they take long.
        await asyncio.sleep(PAUSE_S if now - begun > PATIENCE_S else 0)
        paused = now
        # A sender that has failed moves no bytes any more, nor does one that is gone.
        channel.take_in()
        if now - begun > timeout_s:
            raise channel.error(
                TransferTimeout,
                f"memory of {channel.peer} could not be read in {timeout_s:g} s",
                remedy="check the network; raise refit_timeout_s if it is only slow",
            )


class _Sender:
    """The sender whose buffers are known."""

    def __init__(self, memory_id: str, agent: str, offered: MemoryOffered) -> None:
        self.memory_id = memory_id
        self.agent = agent
        self.offered = offered


@contextlib.contextmanager
def as_loss(channel: ControlChannel) -> Iterator[None]:
    """What NIXL cannot read any more is lost; see `PeerLost`."""
    try:
        yield
    except NixlError as error:
        raise channel.error(
            PeerLost,
            f"{channel.peer} cannot be read from: {error}",
            remedy="see that worker's log for why it ended",
        ) from error
