"""The sending end of one stream.

Rule kept here: whatever ends the stream early is told to every receiver before it is raised.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Sequence

import xxhash
from msgspec import Struct

from rollsync.pure.refit.control import (
    BucketFilled,
    BucketReleased,
    Challenge,
    Failed,
    Hello,
    Piece,
    StreamAccepted,
    StreamEnded,
    Welcome,
)
from rollsync.shell.refit.engines.addresses import connect
from rollsync.shell.refit.engines.base import Weights
from rollsync.shell.refit.engines.channel import NONCE_BYTES, ControlChannel, proof
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from rollsync.shell.refit.engines.media import SenderMemory
from rollsync.shell.refit.engines.memory import bucket_checksum
from rollsync.shell.refit.engines.packing import StreamPacker, TypedBuffer


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
    ) -> None:
        self._memory = memory
        self._policy_rank = policy_rank
        self._train_world_size = train_world_size
        self._rollout_world_size = rollout_world_size
        self._timeout_s = timeout_s
        self._checksum = checksum
        self._channels: list[ControlChannel] = []
        self._released: list[int] = []
        self._packer = StreamPacker(memory.buffer_bytes)
        self._bucket = 0
        self._filled_bytes = 0
        self._pieces: list[Piece] = []
        self._digest = xxhash.xxh3_128()
        self._stage = "connected"
        self._tensor = ""

    async def send(self, receivers: Sequence[Receiver], weights: Weights) -> None:
        """Connect to `receivers`, send `weights` to its end, and wait until all have it."""
        serving = asyncio.create_task(self._memory.serve())
        try:
            for receiver in receivers:
                self._channels.append(await self._connect(receiver))
            self._released = [-1] * len(self._channels)
            typed = [TypedBuffer(buffer) for buffer in self._memory.buffers]
            self._enter("made the weights")
            for name, tensor in weights:
                self._enter("packed", name)
                for part in self._packer.parts(name, tensor):
                    if part.bucket != self._bucket:
                        await self._announce()
                        await self._begin_bucket(part.bucket)
                        self._enter("packed", name)
                    part.copy_into(typed[part.bucket % len(typed)])
                    self._pieces.append(part.piece)
                    self._filled_bytes = part.piece.offset + part.piece.chunk_bytes
                self._enter("made the weights")
            await self._end()
        except BaseException as error:
            await self._tell(error)
            raise
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        for channel in self._channels:
            channel.close()

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
                bucket_bytes=self._memory.buffer_bytes,
                buckets=len(self._memory.buffers),
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
        if welcome.needs_memory:
            await self._memory.hand_over(channel)

    async def _announce(self) -> None:
        """Tell every receiver that the current bucket is filled."""
        filled = self._filled_bytes
        buffer = self._memory.buffers[self._bucket % len(self._memory.buffers)]
        checksum = None
        if self._checksum:
            checksum = bucket_checksum(buffer, filled)
        announcement = BucketFilled(
            bucket=self._bucket,
            filled_bytes=filled,
            checksum=checksum,
            pieces=tuple(self._pieces),
            aliases=(),
        )
        self._enter("announced a bucket")
        for index, channel in enumerate(self._channels):
            message = await channel.send(announcement)
            if index == 0:
                self._digest.update(message)

    async def _begin_bucket(self, bucket: int) -> None:
        """Wait until every receiver has released the bucket that lay in the next one's buffer."""
        await self._await_release(bucket - len(self._memory.buffers))
        self._bucket = bucket
        self._filled_bytes = 0
        self._pieces = []

    async def _await_release(self, bucket: int) -> None:
        self._enter("waited for a bucket's release")
        for index, channel in enumerate(self._channels):
            while self._released[index] < bucket:
                body, _ = await channel.receive()
                if not isinstance(body, BucketReleased) or body.bucket > self._bucket:
                    raise channel.unexpected(body)
                self._released[index] = body.bucket

    async def _end(self) -> None:
        if self._pieces:
            await self._announce()
            sent = self._bucket + 1
        else:
            sent = 0
        await self._await_release(sent - 1)
        self._enter("waited for the stream's acceptance")
        ended = StreamEnded(
            buckets=sent,
            tensors=self._packer.tensors,
            payload_bytes=self._packer.payload_bytes,
            digest=self._digest.hexdigest(),
        )
        for channel in self._channels:
            await channel.send(ended)
        for channel in self._channels:
            body, _ = await channel.receive()
            if not isinstance(body, StreamAccepted):
                raise channel.unexpected(body)

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
