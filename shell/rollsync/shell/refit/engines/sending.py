"""The sending end of one stream over shared buffers.

Rule kept here: whatever ends the stream early is told to every receiver before it is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
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
from rollsync.shell.refit.engines.base import Weights
from rollsync.shell.refit.engines.channel import NONCE_BYTES, ControlChannel, proof
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from rollsync.shell.refit.engines.memory import SharedBuffers, bucket_checksum
from rollsync.shell.refit.engines.packing import StreamPacker

FAREWELL_S = 1.0
"""How long telling a receiver of a failure may take: it may be the one that is stuck."""


class Receiver(Struct, frozen=True, kw_only=True):
    """How to reach a rollout worker."""

    rank: int
    address: str
    """Name of its abstract socket, without the leading zero byte."""
    secret: bytes


class SendingStream:
    """Sends one stream.

    Args:
        buffers: this worker's own; bucket n lies in buffer `n % len(buffers)`.
        memory_id: names `buffers`.
        timeout_s: how long one wait may take.
        checksum: whether buckets carry one.
    """

    def __init__(
        self,
        buffers: SharedBuffers,
        *,
        memory_id: str,
        policy_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        timeout_s: float,
        checksum: bool,
    ) -> None:
        self._buffers = buffers
        self._memory_id = memory_id
        self._policy_rank = policy_rank
        self._train_world_size = train_world_size
        self._rollout_world_size = rollout_world_size
        self._timeout_s = timeout_s
        self._checksum = checksum
        self._channels: list[ControlChannel] = []
        self._released: list[int] = []
        self._packer = StreamPacker(buffers.buffer_bytes)
        self._bucket = 0
        self._filled_bytes = 0
        self._pieces: list[Piece] = []
        self._digest = xxhash.xxh3_128()
        self._stage = "connected"
        self._tensor = ""

    async def send(self, receivers: Sequence[Receiver], weights: Weights) -> None:
        """Connect to `receivers`, send `weights` to its end, and wait until all have it."""
        try:
            for receiver in receivers:
                self._channels.append(await self._connect(receiver))
            self._released = [-1] * len(self._channels)
            self._enter("made the weights")
            for name, tensor in weights:
                self._enter("packed", name)
                for part in self._packer.parts(name, tensor):
                    if part.bucket != self._bucket:
                        await self._announce()
                        await self._begin_bucket(part.bucket)
                        self._enter("packed", name)
                    part.copy_into(self._buffers.buffers[part.bucket % len(self._buffers.buffers)])
                    self._pieces.append(part.piece)
                    self._filled_bytes = part.piece.offset + part.piece.chunk_bytes
                self._enter("made the weights")
            await self._end()
        except BaseException as error:
            await self._tell(error)
            raise
        finally:
            for channel in self._channels:
                channel.close()

    async def _connect(self, receiver: Receiver) -> ControlChannel:
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        me, peer = f"policy {self._policy_rank}", f"rollout {receiver.rank}"
        channel = ControlChannel(
            connection, side="sender", rank=me, peer=peer, timeout_s=self._timeout_s
        )
        try:
            try:
                await loop.sock_connect(connection, b"\0" + receiver.address.encode())
            except OSError as error:
                raise PeerLost(
                    f"{peer} does not listen any more: {error.strerror}",
                    rank=me,
                    stage="connected",
                    remedy="see that worker's log for why it ended",
                ) from error
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
                bucket_bytes=self._buffers.buffer_bytes,
                buckets=len(self._buffers.buffers),
                memory_id=self._memory_id,
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
            # One byte to carry them, into an empty socket buffer: this cannot block.
            socket.send_fds(channel.connection, [b"m"], self._buffers.file_descriptors)

    async def _announce(self) -> None:
        """Tell every receiver that the current bucket is filled."""
        filled = self._filled_bytes
        buffer = self._buffers.buffers[self._bucket % len(self._buffers.buffers)]
        checksum = None
        if self._checksum:
            checksum = bucket_checksum(buffer, filled)
        announcement = BucketFilled(
            bucket=self._bucket,
            filled_bytes=filled,
            checksum=checksum,
            pieces=tuple(self._pieces),
        )
        self._enter("announced a bucket")
        for index, channel in enumerate(self._channels):
            message = await channel.send(announcement)
            if index == 0:
                self._digest.update(message)

    async def _begin_bucket(self, bucket: int) -> None:
        """Wait until every receiver has released the bucket that lay in the next one's buffer."""
        await self._await_release(bucket - len(self._buffers.buffers))
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
            # The receiver may be what failed: then there is nobody to tell.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(FAREWELL_S):
                    await channel.send(failed)

    def _enter(self, stage: str, tensor: str = "") -> None:
        self._stage, self._tensor = stage, tensor
        for channel in self._channels:
            channel.stage, channel.tensor = stage, tensor
