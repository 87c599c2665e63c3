"""How a receiver finds its sender among those who connect.

Rules kept here: nothing is mapped or believed before a connection has proved that it knows the
secret; one that does not is closed; and everybody is greeted at the same time, so that a stranger
who connects and says nothing keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from dataclasses import dataclass

from rollsync.pure.refit import PolicyWorker, RolloutWorker
from rollsync.pure.refit.control import Challenge, Failed, Hello, Welcome
from rollsync.pure.refit.routes import Worker
from rollsync.shell.refit.engines.addresses import Listener
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerLost, TransferError, TransferTimeout
from rollsync.shell.refit.engines.frames import NONCE_BYTES, proof
from rollsync.shell.refit.engines.lifelines import HeldLifeline
from rollsync.shell.refit.engines.media import ReceiverMedium, ReceiverMemory
from rollsync.shell.refit.errors import RefitConfigurationError

GREETING_TIMEOUT_S = 5.0
"""How long a stranger may take to prove itself before it is turned away."""
_MOST_STRANGERS = 64
"""Connections greeted at the same time; the longest silent one makes room for the next."""


@dataclass(frozen=True, kw_only=True)
class ReceivingEnd:
    """Who this receiver is and whom it expects, to check the sender's greeting against."""

    sender: Worker
    rollout_rank: int
    train_world_size: int
    rollout_world_size: int
    timeout_s: float
    """How long one wait for the sender may take."""
    on_host: bool
    """Whether the route goes through the host's memory; if not, over the network."""

    @property
    def name(self) -> str:
        """This worker in words."""
        return str(RolloutWorker(self.rollout_rank))

    def check(self, hello: Hello) -> None:
        """Raise `RefitConfigurationError` if the sender means somebody else."""
        sender = sending_worker(hello)
        counted = (hello.train_world_size, hello.rollout_world_size)
        if counted != (self.train_world_size, self.rollout_world_size):
            raise RefitConfigurationError(
                f"{sender} counts {counted[0]} policy and {counted[1]} rollout"
                f" workers, {self.name} counts {self.train_world_size} and"
                f" {self.rollout_world_size}",
                remedy="set both sides up with the same world sizes",
            )
        if hello.rollout_rank != self.rollout_rank:
            raise RefitConfigurationError(
                f"{sender} means rollout {hello.rollout_rank}, this is {self.name}",
                remedy="give every worker the same metadata, in the same order",
            )
        if sender != self.sender:
            raise RefitConfigurationError(
                f"{sender} sends to {self.name}, which {self.sender} should",
                remedy="give every worker the same options and metadata, in the same order",
            )


def sending_worker(hello: Hello) -> Worker:
    """Who greets."""
    return (RolloutWorker if hello.relays else PolicyWorker)(hello.sender_rank)


@dataclass(frozen=True)
class AdmittedSender:
    """The admitted sender: its connection, and its buffers."""

    channel: ControlChannel
    memory: ReceiverMemory


class Greeting:
    """Waits for the sender of one stream.

    Args:
        listener: where the sender connects.
        lifeline: the sender's, which ends when it dies before it has connected.
        medium: takes over the sender's buffers if they are new.
        me: who this receiver is.
    """

    def __init__(
        self,
        listener: Listener,
        lifeline: HeldLifeline,
        medium: ReceiverMedium,
        me: ReceivingEnd,
    ) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._medium = medium
        self._me = me
        self._greeted: list[asyncio.Task[AdmittedSender | None]] = []

    async def sender(self) -> AdmittedSender:
        """The first connection that proves itself.

        Raises:
            PeerLost: the sender has died.
            TransferTimeout: none did in time.
            RefitConfigurationError: the sender means another receiver, or counts others.
        """
        try:
            async with asyncio.timeout(self._me.timeout_s):
                return await self._first_admitted()
        except TimeoutError as error:
            if isinstance(error, TransferError):
                raise
            late = TransferTimeout(
                f"{self._me.sender} did not come for {self._me.timeout_s:g} s",
                worker=self._me.name,
                stage="waited for the sender",
                remedy="see the log of that worker; raise refit_timeout_s if it is only slow",
            )
            late.waited_for = str(self._me.sender)
            raise late from error
        finally:
            for task in self._greeted:
                task.cancel()
            await asyncio.gather(*self._greeted, return_exceptions=True)

    async def _first_admitted(self) -> AdmittedSender:
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(self._listener.accept())
        dying = loop.create_task(self._lifeline.ended())
        try:
            while True:
                await asyncio.wait(
                    [accepting, dying, *self._greeted], return_when=asyncio.FIRST_COMPLETED
                )
                for task in [task for task in self._greeted if task.done()]:
                    self._greeted.remove(task)
                    admitted = task.result()
                    if admitted is not None:
                        return admitted
                if dying.done():
                    dying.result()
                    raise PeerLost(
                        f"{self._me.sender}, which sends to it, is gone",
                        worker=self._me.name,
                        stage="waited for the sender",
                        remedy="see that worker's log for why it ended",
                    )
                if accepting.done():
                    connection = accepting.result()
                    accepting = loop.create_task(self._listener.accept())
                    self._greeted.append(loop.create_task(self._admit(connection)))
                    if len(self._greeted) > _MOST_STRANGERS:
                        self._greeted[0].cancel()
                        await asyncio.wait([self._greeted.pop(0)])
        finally:
            dying.cancel()
            accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await accepting).close()

    async def _admit(self, connection: socket.socket) -> AdmittedSender | None:
        """Greet one connection; None if it is not of this run's sender, or is dead already."""
        admitted: AdmittedSender | None = None
        try:
            admitted = await self._proved(connection)
        finally:
            if admitted is None:
                connection.close()
        return admitted

    async def _proved(self, connection: socket.socket) -> AdmittedSender | None:
        limit_s = min(self._me.timeout_s, GREETING_TIMEOUT_S)
        channel = self._channel(connection, "a stranger", limit_s)
        nonce = secrets.token_bytes(NONCE_BYTES)
        secret = self._listener.secret
        try:
            await channel.send(Challenge(nonce=nonce))
            hello, _ = await channel.receive()
        except TransferError:
            return None
        if not isinstance(hello, Hello) or not hmac.compare_digest(
            hello.proof, proof(secret, "sender", nonce, hello.nonce)
        ):
            return None
        try:
            self._me.check(hello)
        except RefitConfigurationError as error:
            here = self._me.name
            await channel.send(
                Failed(worker=here, stage="connected", tensor="", message=str(error))
            )
            raise
        needs_memory = not self._medium.knows(hello.memory_id)
        await channel.send(
            Welcome(proof=proof(secret, "receiver", nonce, hello.nonce), needs_memory=needs_memory)
        )
        greeted = self._channel(connection, str(sending_worker(hello)), self._me.timeout_s)
        greeted.authenticate(secret, nonce, hello.nonce)
        greeted.continue_from(channel)
        return AdmittedSender(greeted, await self._medium.take_over(greeted, hello))

    def _channel(self, connection: socket.socket, peer: str, timeout_s: float) -> ControlChannel:
        return ControlChannel(
            connection,
            side="receiver",
            worker=self._me.name,
            peer=peer,
            timeout_s=timeout_s,
            on_host=self._me.on_host,
        )
