"""A sender's connections to its receivers, for one stream.

Rules kept here: the receivers are connected to all at once, so that one that is gone, or hangs,
keeps nobody from being told of it; a receiver that does not know the run's secret is told nothing
of the buffers; and one that was connected to is told of whatever ends the stream early.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Sequence

from msgspec import Struct

from rollsync.pure.refit import RolloutWorker
from rollsync.pure.refit.control import (
    BucketReleased,
    Challenge,
    ControlBody,
    Failed,
    Hello,
    Welcome,
)
from rollsync.pure.refit.ring import Ring
from rollsync.pure.refit.routes import Worker
from rollsync.shell.refit.engines.addresses import connect
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from rollsync.shell.refit.engines.frames import NONCE_BYTES, proof
from rollsync.shell.refit.engines.media import SenderMemory


class Receiver(Struct, frozen=True, kw_only=True):
    """How to reach a rollout worker."""

    rank: int
    address: str
    """Where it listens; see `addresses`."""
    secret: bytes
    timeout_s: float
    """How long one wait for it may take."""
    on_host: bool
    """Whether the route to it goes through the host's memory; if not, over the network."""


class Introduction(Struct, frozen=True, kw_only=True):
    """Who a worker is, and how many it counts."""

    worker: Worker
    train_world_size: int
    rollout_world_size: int


def position_released(
    channel: ControlChannel, said: ControlBody, ring: Ring, *, before: int, announced: int
) -> int:
    """Before which position a receiver has released a sender's buffers.

    Args:
        said: what it said.
        before: what it had released by then.
        announced: up to where it was told of the stream.

    Raises:
        PeerRefused: it has released nothing, or what it cannot have had.
    """
    if isinstance(said, BucketReleased):
        released = ring.position(said.bucket, said.released_bytes)
        if before <= released <= announced:
            return released
    raise channel.unexpected(said)


class Connections:
    """Those of one sender for one stream.

    Args:
        memory: the sender's buffers; they are handed over to receivers that do not know them.
        me: who the sender is.
    """

    def __init__(self, memory: SenderMemory, me: Introduction) -> None:
        self._memory = memory
        self._me = me
        self._by_index: dict[int, ControlChannel] = {}

    @property
    def channels(self) -> list[ControlChannel]:
        """To those that are connected, in the order in which they were given."""
        return [channel for _, channel in sorted(self._by_index.items())]

    async def open(self, receivers: Sequence[Receiver]) -> None:
        """Connect to all.

        Raises:
            PeerLost: one is gone; the others are connected nevertheless.
            TransferError: one could not be agreed with; likewise.
        """
        connected = await asyncio.gather(
            *(self._connect(index, each) for index, each in enumerate(receivers)),
            return_exceptions=True,
        )
        for each in connected:
            if each is not None:
                raise each

    def enter(self, stage: str, tensor: str = "") -> None:
        """What this sender does now, for errors."""
        for channel in self._by_index.values():
            channel.enter(stage, tensor)

    async def tell(self, failed: Failed) -> None:
        """Tell all of a failure, and end the connections."""
        for channel in self.channels:
            await channel.bid_farewell(failed)

    def close(self) -> None:
        """End the connections."""
        for channel in self._by_index.values():
            channel.close()

    async def _connect(self, index: int, receiver: Receiver) -> None:
        me, peer = str(self._me.worker), str(RolloutWorker(receiver.rank))
        try:
            async with asyncio.timeout(receiver.timeout_s):
                connection = await connect(receiver.address)
        except OSError as error:
            raise PeerLost(
                f"{peer} does not listen any more: {error.strerror or error}",
                worker=me,
                stage="connected",
                remedy="see that worker's log for why it ended",
            ) from error
        channel = ControlChannel(
            connection,
            side="sender",
            worker=me,
            peer=peer,
            timeout_s=receiver.timeout_s,
            on_host=receiver.on_host,
        )
        try:
            await self._greet(channel, receiver)
        except BaseException:
            channel.close()
            raise
        self._by_index[index] = channel

    async def _greet(self, channel: ControlChannel, receiver: Receiver) -> None:
        challenge, _ = await channel.receive()
        if not isinstance(challenge, Challenge):
            raise channel.unexpected(challenge)
        nonce = secrets.token_bytes(NONCE_BYTES)
        nonces = (challenge.nonce, nonce)
        await channel.send(
            Hello(
                nonce=nonce,
                proof=proof(receiver.secret, "sender", *nonces),
                sender_rank=self._me.worker.rank,
                relays=isinstance(self._me.worker, RolloutWorker),
                rollout_rank=receiver.rank,
                train_world_size=self._me.train_world_size,
                rollout_world_size=self._me.rollout_world_size,
                buffer_bytes=self._memory.buffers.buffer_bytes,
                buffers=self._memory.buffers.count,
                memory_id=self._memory.memory_id,
            )
        )
        welcome, _ = await channel.receive()
        if not isinstance(welcome, Welcome):
            raise channel.unexpected(welcome)
        if not hmac.compare_digest(welcome.proof, proof(receiver.secret, "receiver", *nonces)):
            raise PeerRefused(
                f"{channel.peer} does not know the run's secret",
                worker=channel.worker,
                stage="connected",
                remedy="make sure that no other program listens in this run's name",
            )
        channel.authenticate(receiver.secret, *nonces)
        channel.between_looks(self._memory.progress)
        if welcome.needs_memory:
            await self._memory.hand_over(channel)
