"""The receiving end of one stream.

Rules kept here: nothing is mapped or believed before the sender has proved that it knows the
secret; a connection that does not is closed, and the next one is waited for; a bucket that is read
in place is released when the consumer asks for the next, which is when it has loaded this one; and
the stream is accepted when all of it is loaded.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import torch
import xxhash

from rollsync.pure.refit.control import (
    BucketFilled,
    BucketReleased,
    Challenge,
    Failed,
    Hello,
    StreamAccepted,
    StreamEnded,
    Welcome,
)
from rollsync.shell.refit.engines.addresses import Listener
from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.engines.batches import ConsumerStop
from rollsync.shell.refit.engines.channel import NONCE_BYTES, ControlChannel, proof
from rollsync.shell.refit.engines.errors import PeerRefused, TransferError, TransferTimeout
from rollsync.shell.refit.engines.media import ReceiverMedium, ReceiverMemory
from rollsync.shell.refit.engines.memory import bucket_checksum
from rollsync.shell.refit.engines.packing import StreamUnpacker
from rollsync.shell.refit.errors import RefitConfigurationError

GREETING_TIMEOUT_S = 5.0
"""How long a stranger may take to prove itself before it is turned away."""


async def receive_stream(
    listener: Listener,
    medium: ReceiverMedium,
    *,
    rollout_rank: int,
    train_world_size: int,
    rollout_world_size: int,
    timeout_s: float,
    stop: ConsumerStop,
) -> AsyncGenerator[Batch, None]:
    """The batches of the next stream.

    Args:
        listener: where the sender connects.
        medium: how the sender's buffers are read.
        timeout_s: how long one wait may take.
        stop: where the consumer's error is noted when it stops early.
    """
    greeting = _Greeting(
        listener,
        medium,
        rollout_rank=rollout_rank,
        train_world_size=train_world_size,
        rollout_world_size=rollout_world_size,
        timeout_s=timeout_s,
    )
    channel, memory = await greeting.sender()
    async with _telling(channel, rollout_rank, stop):
        async with aclosing(_Arrivals(channel, memory).batches()) as arriving:
            async for whole in arriving:
                yield whole
                _finish_loads()
        await channel.send(StreamAccepted())


class _Arrivals:
    """The buckets of one stream as they come, checked."""

    def __init__(self, channel: ControlChannel, memory: ReceiverMemory) -> None:
        self._channel = channel
        self._memory = memory
        self._unpacker = StreamUnpacker(memory.buffer_bytes)
        self._digest = xxhash.xxh3_128()
        self._started = 0
        self._ahead: BucketFilled | StreamEnded | None = None

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """The whole tensors of each bucket; a bucket is done with when the next is asked for."""
        channel = self._channel
        buckets = 0
        while True:
            body = self._ahead if self._ahead is not None else await self._announced()
            self._ahead = None
            if isinstance(body, StreamEnded):
                self._check_end(body, buckets)
                return
            channel.stage = "read a bucket"
            channel.tensor = body.pieces[0].name if body.pieces else ""
            buffer = await self._memory.fetch(channel, body.bucket, body.filled_bytes)
            self._check_contents(body, buffer)
            if not self._memory.in_place:
                await channel.send(BucketReleased(bucket=body.bucket))
                if channel.has_news():
                    # The next bucket travels while this one is loaded.
                    self._ahead = await self._announced()
            channel.stage = "loaded"
            channel.tensor = body.pieces[0].name if body.pieces else ""
            whole = self._unpacker.batch(body.bucket, body.pieces, buffer)
            if whole:
                yield whole
            buckets += 1
            if self._memory.in_place:
                await channel.send(BucketReleased(bucket=body.bucket))

    async def _announced(self) -> BucketFilled | StreamEnded:
        """The next announcement; of a bucket, its reading has begun."""
        channel = self._channel
        channel.stage, channel.tensor = "waited for a bucket", ""
        body, message = await channel.receive()
        if isinstance(body, StreamEnded):
            return body
        if not isinstance(body, BucketFilled) or body.bucket != self._started:
            raise channel.unexpected(body)
        if body.filled_bytes > self._memory.buffer_bytes:
            raise self._damaged(f"{body.filled_bytes} bytes in one bucket")
        self._started += 1
        self._digest.update(message)
        self._memory.start(channel, body.bucket, body.filled_bytes)
        return body

    def _check_end(self, ended: StreamEnded, buckets: int) -> None:
        self._unpacker.check_complete()
        received = StreamEnded(
            buckets=buckets,
            tensors=self._unpacker.tensors,
            payload_bytes=self._unpacker.payload_bytes,
            digest=self._digest.hexdigest(),
        )
        if ended != received:
            raise self._damaged(f"sent {ended}, received {received}")

    def _check_contents(self, announced: BucketFilled, buffer: torch.Tensor) -> None:
        if announced.checksum is None:
            return
        found = bucket_checksum(buffer, announced.filled_bytes)
        if found != announced.checksum:
            raise self._damaged(
                f"bucket {announced.bucket} has checksum {found}, sent as {announced.checksum}"
            )

    def _damaged(self, what: str) -> PeerRefused:
        return PeerRefused(
            f"the stream of {self._channel.peer} is damaged: {what}",
            rank=self._channel.rank,
            stage=self._channel.stage,
            tensor=self._channel.tensor,
            remedy="run the sync again; if it repeats, check the host's memory",
        )


class _Greeting:
    """Waits for the sender that knows the secret."""

    def __init__(
        self,
        listener: Listener,
        medium: ReceiverMedium,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._medium = medium
        self._rollout_rank = rollout_rank
        self._worlds = (train_world_size, rollout_world_size)
        self._timeout_s = timeout_s
        self._me = f"rollout {rollout_rank}"

    async def sender(self) -> tuple[ControlChannel, ReceiverMemory]:
        """The first connection whose sender proves itself, and its buffers."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    connection = await self._listener.accept()
                    admitted = await self._admit(connection)
                    if admitted is not None:
                        return admitted
        except TimeoutError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferTimeout(
                f"no sender came for {self._timeout_s:g} s",
                rank=self._me,
                stage="waited for the sender",
                remedy="see the policy worker's log; raise refit_timeout_s if it is only slow",
            ) from error

    async def _admit(
        self, connection: socket.socket
    ) -> tuple[ControlChannel, ReceiverMemory] | None:
        """Greet one connection; None if it is not of this run's sender, or is dead already."""
        limit_s = min(self._timeout_s, GREETING_TIMEOUT_S)
        channel = self._channel(connection, limit_s)
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            await channel.send(Challenge(nonce=nonce))
            hello, _ = await channel.receive()
        except TransferError:
            channel.close()
            return None
        secret = self._listener.secret
        if not isinstance(hello, Hello) or not hmac.compare_digest(
            hello.proof, proof(secret, "sender", nonce, hello.nonce)
        ):
            channel.close()
            return None
        nonces = (nonce, hello.nonce)
        try:
            self._check(hello)
        except RefitConfigurationError as error:
            failed = Failed(
                rank=self._rollout_rank, stage="connected", tensor="", message=str(error)
            )
            await channel.send(failed)
            channel.close()
            raise
        needs_memory = not self._medium.knows(hello.memory_id)
        await channel.send(
            Welcome(proof=proof(secret, "receiver", *nonces), needs_memory=needs_memory)
        )
        greeted = self._channel(connection, self._timeout_s, policy_rank=hello.policy_rank)
        greeted.authenticate(secret, *nonces)
        greeted.continue_from(channel)
        try:
            return greeted, await self._medium.take_over(greeted, hello)
        except BaseException:
            greeted.close()
            raise

    def _channel(
        self, connection: socket.socket, timeout_s: float, *, policy_rank: int | None = None
    ) -> ControlChannel:
        peer = "a stranger" if policy_rank is None else f"policy {policy_rank}"
        return ControlChannel(
            connection, side="receiver", rank=self._me, peer=peer, timeout_s=timeout_s
        )

    def _check(self, hello: Hello) -> None:
        if (hello.train_world_size, hello.rollout_world_size) != self._worlds:
            raise RefitConfigurationError(
                f"policy {hello.policy_rank} counts {hello.train_world_size} policy and"
                f" {hello.rollout_world_size} rollout workers, {self._me} counts"
                f" {self._worlds[0]} and {self._worlds[1]}",
                remedy="set both sides up with the same world sizes",
            )
        if hello.rollout_rank != self._rollout_rank:
            raise RefitConfigurationError(
                f"policy {hello.policy_rank} means rollout {hello.rollout_rank},"
                f" this is {self._me}",
                remedy="give every worker the same metadata, in the same order",
            )


@asynccontextmanager
async def _telling(
    channel: ControlChannel, rollout_rank: int, stop: ConsumerStop
) -> AsyncIterator[None]:
    """Tell the sender of whatever ends the stream early, and close the connection."""
    try:
        yield
    except BaseException as error:
        failed = Failed(
            rank=rollout_rank,
            stage=channel.stage,
            tensor=channel.tensor,
            message=stop.describe(error),
        )
        await channel.part(failed)
        raise
    channel.close()


def _finish_loads() -> None:
    """Wait for copies from the buffer that a device still has queued."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
