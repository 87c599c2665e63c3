"""Transfer buffers that are read over NIXL, on both ends.

A receiver has two buffers of its own, so that one bucket travels while the one before is loaded,
and the sender gets its buffer back as soon as it was read.

Rule kept here: a read that is under way when a stream ends is ended before its buffer is used
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from rollsync.pure.refit.control import Hello, MemoryOffered
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused, TransferTimeout
from rollsync.shell.refit.engines.nixl_agent import NixlAgent, NixlError, Read, memory_of

if TYPE_CHECKING:
    from nixl_cu12._api import Registered

SPINS = 200
"""How often a read is asked for without a pause: most end within microseconds."""
PAUSE_S = 0.0002


class RegisteredBuffers:
    """Buffers registered with an agent.

    Args:
        agent: where to.
        count: how many.
        buffer_bytes: size of each.
        device: the torch device that has them.
    """

    def __init__(
        self, agent: NixlAgent, count: int, buffer_bytes: int, device: torch.device
    ) -> None:
        # Host memory that a device copies from or to has to be pinned to be fast.
        pinned = device.type == "cpu" and torch.cuda.is_available()
        self.buffers: list[torch.Tensor] = [
            torch.empty(buffer_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            for _ in range(count)
        ]
        self.buffer_bytes = buffer_bytes
        self.memory_id = secrets.token_hex(16)
        self._agent = agent
        self._registered: Sequence[Registered] = agent.register(self.buffers)

    async def hand_over(self, channel: ControlChannel) -> None:
        """Tell a receiver where the buffers are."""
        kind, device = memory_of(self.buffers[0])
        await channel.send(
            MemoryOffered(
                agent=self._agent.metadata,
                memory=kind,
                device=device,
                addresses=tuple(buffer.data_ptr() for buffer in self.buffers),
            )
        )

    async def serve(self) -> None:
        """Answer readers whenever this end waits: some transports need it for every byte, the
        others to connect."""
        while True:
            self._agent.progress()
            await asyncio.sleep(PAUSE_S)

    def release(self) -> None:
        """Deregister and free."""
        self._agent.deregister(self._registered)
        self._registered = ()
        self.buffers.clear()


class NixlMedium:
    """A receiver's own buffers, and the one sender whose buffers it knows.

    Args:
        agent: this worker's agent.
        buffers: this worker's buffers.
        timeout_s: how long one read may take.
    """

    in_place: ClassVar[bool] = False

    def __init__(self, agent: NixlAgent, buffers: RegisteredBuffers, timeout_s: float) -> None:
        self.buffer_bytes = buffers.buffer_bytes
        self._agent = agent
        self._buffers = buffers
        self._timeout_s = timeout_s
        self._sender: _Sender | None = None
        self._reads: dict[int, Read] = {}

    def knows(self, memory_id: str) -> bool:
        """Whether these are the sender's buffers of the last stream."""
        return self._sender is not None and self._sender.memory_id == memory_id

    async def take_over(self, channel: ControlChannel, hello: Hello) -> NixlMedium:
        """Learn where the sender's buffers are, unless they are known."""
        self._end_reads()
        if self.knows(hello.memory_id):
            return self
        self._forget_sender()
        offered, _ = await channel.receive()
        if not isinstance(offered, MemoryOffered):
            raise channel.unexpected(offered)
        if hello.bucket_bytes != self.buffer_bytes or len(offered.addresses) != hello.buckets:
            raise PeerRefused(
                f"policy {hello.policy_rank} has {len(offered.addresses)} buffers of"
                f" {hello.bucket_bytes} bytes, here they have {self.buffer_bytes}",
                rank=channel.rank,
                stage="connected",
                remedy="create both sides' engines with one bucket size",
            )
        with _as_loss(channel):
            # NIXL connects here, and a sender that died since it offered is not there any more.
            agent = self._agent.meet(offered.agent)
        self._sender = _Sender(hello.memory_id, agent, offered)
        return self

    def start(
        self, channel: ControlChannel, bucket: int, first_byte: int, filled_bytes: int
    ) -> None:
        """Begin to read the bucket into this worker's buffer.

        Raises:
            PeerLost: NIXL cannot reach the sender.
        """
        sender = self._sender
        if sender is None or not filled_bytes:
            return
        offered = sender.offered
        source = (
            offered.addresses[bucket % len(offered.addresses)] + first_byte,
            offered.device,
            offered.memory,
        )
        target = self._buffers.buffers[bucket % len(self._buffers.buffers)][:filled_bytes]
        with _as_loss(channel):
            self._reads[bucket] = self._agent.read(sender.agent, source, target)

    async def fetch(
        self, channel: ControlChannel, bucket: int, first_byte: int, filled_bytes: int
    ) -> torch.Tensor:
        """Wait for the read that was begun.

        Raises:
            PeerLost: the sender is gone, or NIXL cannot reach it.
            TransferTimeout: the read takes too long.
        """
        read = self._reads.get(bucket)
        if read is not None:
            with _as_loss(channel):
                await self._finished(channel, read)
            del self._reads[bucket]
            read.release()
        return self._buffers.buffers[bucket % len(self._buffers.buffers)]

    async def _finished(self, channel: ControlChannel, read: Read) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        asked = 0
        while not read.is_done():
            asked += 1
            if asked < SPINS:
                continue
            await asyncio.sleep(PAUSE_S)
            if channel.has_ended():
                raise channel.lost()
            if loop.time() > deadline:
                raise TransferTimeout(
                    f"a bucket of {channel.peer} could not be read in {self._timeout_s:g} s",
                    rank=channel.rank,
                    stage=channel.stage,
                    tensor=channel.tensor,
                    remedy="check the network; raise refit_timeout_s if it is only slow",
                )

    def release(self) -> None:
        """Forget the sender, and give this worker's buffers back."""
        self._end_reads()
        self._forget_sender()
        self._buffers.release()

    def _end_reads(self) -> None:
        for read in self._reads.values():
            read.release()
        self._reads.clear()

    def _forget_sender(self) -> None:
        if self._sender is not None:
            name, self._sender = self._sender.agent, None
            # A sender that was killed cannot be parted from properly.
            with contextlib.suppress(NixlError):
                self._agent.forget(name)


class _Sender:
    """The sender whose buffers are known."""

    def __init__(self, memory_id: str, agent: str, offered: MemoryOffered) -> None:
        self.memory_id = memory_id
        self.agent = agent
        self.offered = offered


@contextlib.contextmanager
def _as_loss(channel: ControlChannel) -> Iterator[None]:
    """What NIXL cannot read any more is lost; see `PeerLost`."""
    try:
        yield
    except NixlError as error:
        raise PeerLost(
            f"{channel.peer} cannot be read from: {error}",
            rank=channel.rank,
            stage=channel.stage,
            tensor=channel.tensor,
            remedy="see that worker's log for why it ended",
        ) from error
