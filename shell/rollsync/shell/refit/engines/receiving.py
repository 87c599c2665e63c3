"""The receiving end of one stream over shared buffers.

Rules kept here: nothing is mapped or believed before the sender has proved that it knows the
secret; a connection that does not is closed, and the next one is waited for; and a bucket is
released when the consumer asks for the next, which is when it has loaded this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

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
from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.engines.batches import ConsumerStop
from rollsync.shell.refit.engines.channel import NONCE_BYTES, ControlChannel, proof
from rollsync.shell.refit.engines.errors import PeerRefused, TransferError, TransferTimeout
from rollsync.shell.refit.engines.memory import SharedBuffers, bucket_checksum
from rollsync.shell.refit.engines.packing import StreamUnpacker
from rollsync.shell.refit.engines.sending import FAREWELL_S
from rollsync.shell.refit.errors import RefitConfigurationError

GREETING_TIMEOUT_S = 5.0
"""How long a stranger may take to prove itself before it is turned away."""
_BACKLOG = 16
_SECRET_BYTES = 32
_MOST_BUFFERS = 16


@dataclass(frozen=True)
class Listener:
    """Where a receiver waits for its sender, and the secret that admits it."""

    socket: socket.socket
    address: str
    secret: bytes

    @classmethod
    def open(cls) -> Listener:
        """Listen at a new random abstract address."""
        address = f"rollsync-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.setblocking(False)
        listening.bind(b"\0" + address.encode())
        listening.listen(_BACKLOG)
        return cls(listening, address, secrets.token_bytes(_SECRET_BYTES))

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


async def receive_stream(
    listener: Listener,
    mapped: dict[str, SharedBuffers],
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
        mapped: buffers by memory id, kept from stream to stream; only the newest stays.
        timeout_s: how long one wait may take.
        stop: where the consumer's error is noted when it stops early.
    """
    greeting = _Greeting(
        listener,
        mapped,
        rollout_rank=rollout_rank,
        train_world_size=train_world_size,
        rollout_world_size=rollout_world_size,
        timeout_s=timeout_s,
    )
    channel, buffers = await greeting.sender()
    async with _telling(channel, rollout_rank, stop):
        unpacker = StreamUnpacker(buffers.buffer_bytes)
        digest = xxhash.xxh3_128()
        buckets = 0
        while True:
            channel.stage, channel.tensor = "waited for a bucket", ""
            body, message = await channel.receive()
            if isinstance(body, StreamEnded):
                unpacker.check_complete()
                received = StreamEnded(
                    buckets=buckets,
                    tensors=unpacker.tensors,
                    payload_bytes=unpacker.payload_bytes,
                    digest=digest.hexdigest(),
                )
                if body != received:
                    raise _damaged(channel, rollout_rank, f"sent {body}, received {received}")
                break
            if not isinstance(body, BucketFilled) or body.bucket != buckets:
                raise channel.unexpected(body)
            digest.update(message)
            buffer = buffers.buffers[body.bucket % len(buffers.buffers)]
            _check_contents(channel, rollout_rank, body, buffer)
            channel.stage = "loaded"
            channel.tensor = body.pieces[0].name if body.pieces else ""
            whole = unpacker.batch(body.bucket, body.pieces, buffer)
            if whole:
                yield whole
                _finish_loads()
            buckets += 1
            await channel.send(BucketReleased(bucket=body.bucket))
        await channel.send(StreamAccepted())


class _Greeting:
    """Waits for the sender that knows the secret."""

    def __init__(
        self,
        listener: Listener,
        mapped: dict[str, SharedBuffers],
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._mapped = mapped
        self._rollout_rank = rollout_rank
        self._worlds = (train_world_size, rollout_world_size)
        self._timeout_s = timeout_s
        self._me = f"rollout {rollout_rank}"

    async def sender(self) -> tuple[ControlChannel, SharedBuffers]:
        """The first connection whose sender proves itself, and its buffers."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    connection, _ = await loop.sock_accept(self._listener.socket)
                    connection.setblocking(False)
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
    ) -> tuple[ControlChannel, SharedBuffers] | None:
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
        known = self._mapped.get(hello.memory_id)
        await channel.send(
            Welcome(proof=proof(secret, "receiver", *nonces), needs_memory=known is None)
        )
        buffers = known if known is not None else await self._map(channel, hello)
        greeted = self._channel(connection, self._timeout_s, policy_rank=hello.policy_rank)
        greeted.authenticate(secret, *nonces)
        greeted.continue_from(channel)
        return greeted, buffers

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

    async def _map(self, channel: ControlChannel, hello: Hello) -> SharedBuffers:
        """Take the sender's buffers over the connection and map them."""
        await _readable(channel.connection, min(self._timeout_s, GREETING_TIMEOUT_S))
        _, descriptors, _, _ = socket.recv_fds(channel.connection, 1, _MOST_BUFFERS)
        sizes = [os.fstat(each).st_size for each in descriptors]
        if len(descriptors) != hello.buckets or any(size < hello.bucket_bytes for size in sizes):
            for each in descriptors:
                os.close(each)
            raise PeerRefused(
                f"policy {hello.policy_rank} announced {hello.buckets} buffers of"
                f" {hello.bucket_bytes} bytes and handed over {sizes}",
                rank=self._me,
                stage="connected",
                remedy="make sure that both ends run one version of rollsync",
            )
        for old in self._mapped.values():
            old.release()
        self._mapped.clear()
        buffers = SharedBuffers(descriptors, hello.bucket_bytes)
        self._mapped[hello.memory_id] = buffers
        return buffers


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
        with contextlib.suppress(Exception):
            async with asyncio.timeout(FAREWELL_S):
                await channel.send(failed)
        raise
    finally:
        channel.close()


def _check_contents(
    channel: ControlChannel, rollout_rank: int, announced: BucketFilled, buffer: torch.Tensor
) -> None:
    if announced.filled_bytes > len(buffer):
        raise _damaged(channel, rollout_rank, f"{announced.filled_bytes} bytes in one bucket")
    if announced.checksum is None:
        return
    found = bucket_checksum(buffer, announced.filled_bytes)
    if found != announced.checksum:
        raise _damaged(
            channel,
            rollout_rank,
            f"bucket {announced.bucket} has checksum {found}, sent as {announced.checksum}",
        )


def _damaged(channel: ControlChannel, rollout_rank: int, what: str) -> PeerRefused:
    return PeerRefused(
        f"the stream of {channel.peer} is damaged: {what}",
        rank=f"rollout {rollout_rank}",
        stage=channel.stage,
        tensor=channel.tensor,
        remedy="run the sync again; if it repeats, check the host's memory",
    )


def _finish_loads() -> None:
    """Wait for copies from the buffer that a device still has queued."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


async def _readable(connection: socket.socket, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def is_readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, is_readable)
    try:
        async with asyncio.timeout(timeout_s):
            await ready
    finally:
        loop.remove_reader(connection)
