"""The sending end of one stream.

Rule kept here: whatever ends the stream early is told to every receiver before it is raised.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from returns.pipeline import is_successful

from rollsync.pure.refit import TensorSpec, describe
from rollsync.pure.refit.control import Challenge, Failed, Hello, Welcome
from rollsync.pure.refit.layout import SentPart
from rollsync.pure.refit.sharing import share_buffers
from rollsync.shell.refit.engines.addresses import connect
from rollsync.shell.refit.engines.base import Weights
from rollsync.shell.refit.engines.channel import NONCE_BYTES, ControlChannel, proof
from rollsync.shell.refit.engines.declared import Declaration, DeclaredOrder, Repeated
from rollsync.shell.refit.engines.direct_sending import DirectSender
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from rollsync.shell.refit.engines.media import SenderMemory
from rollsync.shell.refit.engines.opening import offer_plan
from rollsync.shell.refit.engines.outlets import Outlet
from rollsync.shell.refit.errors import RefitConfigurationError


class Receiver(Struct, frozen=True, kw_only=True):
    """How to reach a rollout worker."""

    rank: int
    address: str
    """Where it listens; see `addresses`."""
    secret: bytes


class SendingStream:
    """Sends one stream.

    Args:
        memory: this worker's buffers; bucket n lies in buffer `n % len(buffers)`.
        timeout_s: how long one wait may take.
        checksum: whether buckets carry one.
        declaration: what the weights were declared as; None when they were not.
        direct: offers receivers what they read themselves; None when they read nothing so.
    """

    def __init__(
        self,
        memory: SenderMemory,
        *,
        policy_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        timeout_s: float,
        checksum: bool,
        declaration: Declaration | None,
        direct: DirectSender | None,
    ) -> None:
        self._memory = memory
        self._policy_rank = policy_rank
        self._train_world_size = train_world_size
        self._rollout_world_size = rollout_world_size
        self._timeout_s = timeout_s
        self._checksum = checksum
        self._declaration = declaration
        self._direct = direct
        self._channels: list[ControlChannel] = []
        self._stage = "connected"
        self._tensor = ""

    async def send(self, receivers: Sequence[Receiver], weights: Weights) -> None:
        """Connect to `receivers`, send `weights` to its end, and wait until all have it."""
        serving = asyncio.create_task(self._memory.serve())
        try:
            outlets = await self._open(receivers)
            order = DeclaredOrder(self._declaration)
            self._enter("made the weights")
            for name, tensor in weights:
                self._enter("packed", name)
                declared = order.place(name, tensor)
                if declared is not Repeated.ALIAS:
                    await self._put(outlets, declared, name, tensor)
                self._enter("made the weights")
            order.check_complete()
            if self._direct is not None:
                await self._direct.end()
            self._enter("waited for the stream's acceptance")
            for outlet in outlets:
                await outlet.end()
            for outlet in outlets:
                await outlet.await_acceptance()
        except BaseException as error:
            await self._tell(error)
            raise
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        for channel in self._channels:
            channel.close()

    async def _put(
        self,
        outlets: Sequence[Outlet],
        declared: TensorSpec | None,
        name: str,
        tensor: torch.Tensor,
    ) -> None:
        places = None if self._direct is None else self._direct.places_of(name, tensor)
        if self._direct is not None and places is not None:
            if self._direct.has_offered_nothing:
                # The weight version comes first, and with it the receiver's update begins.
                for outlet in outlets:
                    await outlet.flush()
            await self._direct.put(name, tensor, places)
            return
        for outlet in outlets:
            await outlet.put(declared, name, tensor)

    async def _open(self, receivers: Sequence[Receiver]) -> list[Outlet]:
        """Connect to all receivers, and agree with each on what it is sent."""
        await self._connect_to_all(receivers)
        layouts = [
            await offer_plan(channel, self._declaration, receiver.rank)
            for channel, receiver in zip(self._channels, receivers, strict=True)
        ]
        region = self._memory.region
        shares = share_buffers(layouts, region.buffer_bytes, region.count)
        if not is_successful(shares):
            raise RefitConfigurationError(describe(shares.failure()), error=shares.failure())
        outlets = [
            Outlet(
                self._memory,
                share,
                [self._channels[index] for index in share.receivers],
                self._parts_of(share.layout),
                checksum=self._checksum,
            )
            for share in shares.unwrap()
        ]
        for outlet in outlets:
            await outlet.begin()
        if self._direct is not None:
            await self._direct.open(self._channels)
        return outlets

    async def _connect_to_all(self, receivers: Sequence[Receiver]) -> None:
        """Connect to all receivers at once: one that is gone, or hangs, keeps nobody from being
        told of it."""
        connected = await asyncio.gather(
            *(self._connect(receiver) for receiver in receivers), return_exceptions=True
        )
        self._channels = [each for each in connected if isinstance(each, ControlChannel)]
        for each in connected:
            if isinstance(each, BaseException):
                raise each

    def _parts_of(self, layout: str | None) -> Mapping[str, Sequence[SentPart]] | None:
        if layout is None or self._declaration is None:
            return None
        return self._declaration.parts_of(layout)

    async def _connect(self, receiver: Receiver) -> ControlChannel:
        me, peer = f"policy {self._policy_rank}", f"rollout {receiver.rank}"
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await connect(receiver.address)
        except OSError as error:
            raise PeerLost(
                f"{peer} does not listen any more: {error.strerror or error}",
                rank=me,
                stage="connected",
                remedy="see that worker's log for why it ended",
            ) from error
        channel = ControlChannel(
            connection, side="sender", rank=me, peer=peer, timeout_s=self._timeout_s
        )
        try:
            await self._greet(channel, receiver)
        except BaseException:
            channel.close()
            raise
        return channel

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
                policy_rank=self._policy_rank,
                rollout_rank=receiver.rank,
                train_world_size=self._train_world_size,
                rollout_world_size=self._rollout_world_size,
                bucket_bytes=self._memory.region.buffer_bytes,
                buckets=self._memory.region.count,
                memory_id=self._memory.memory_id,
            )
        )
        welcome, _ = await channel.receive()
        if not isinstance(welcome, Welcome):
            raise channel.unexpected(welcome)
        if not hmac.compare_digest(welcome.proof, proof(receiver.secret, "receiver", *nonces)):
            raise PeerRefused(
                f"{channel.peer} does not know the run's secret",
                rank=f"policy {self._policy_rank}",
                stage="connected",
                remedy="make sure that no other program listens in this run's name",
            )
        channel.authenticate(receiver.secret, *nonces)
        channel.while_looking = self._memory.progress
        if welcome.needs_memory:
            await self._memory.hand_over(channel)

    async def _tell(self, error: BaseException) -> None:
        failed = Failed(
            rank=self._policy_rank,
            stage=self._stage,
            tensor=self._tensor,
            message=f"{type(error).__name__}: {error}",
        )
        for channel in self._channels:
            await channel.part(failed)

    def _enter(self, stage: str, tensor: str = "") -> None:
        self._stage, self._tensor = stage, tensor
        for channel in self._channels:
            channel.stage, channel.tensor = stage, tensor
