"""The receiving end of one stream.

Rules kept here: a bucket that is read in place is released when the consumer asks for the next,
which is when it has loaded this one; and the stream is accepted when all of it is loaded.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import torch
import xxhash

from rollsync.pure.refit import ALIGNMENT_BYTES, check_bucket_bytes
from rollsync.pure.refit.control import (
    BucketFilled,
    BucketReleased,
    Failed,
    StreamAccepted,
    StreamBegins,
    StreamEnded,
)
from rollsync.shell.refit.engines.addresses import Listener
from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.engines.batches import ConsumerStop
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerRefused
from rollsync.shell.refit.engines.greeting import Greeting, Place
from rollsync.shell.refit.engines.lifelines import HeldLifeline
from rollsync.shell.refit.engines.media import ReceiverMedium, ReceiverMemory
from rollsync.shell.refit.engines.memory import bucket_checksum
from rollsync.shell.refit.engines.opening import Expectation, answer_plan
from rollsync.shell.refit.engines.packing import StreamUnpacker


async def receive_stream(
    listener: Listener,
    feeder: HeldLifeline,
    medium: ReceiverMedium,
    *,
    place: Place,
    expectation: Expectation,
    timeout_s: float,
    stop: ConsumerStop,
) -> AsyncGenerator[Batch, None]:
    """The batches of the next stream.

    Args:
        listener: where the sender connects.
        feeder: tells when the sender has died before it connected.
        medium: how the sender's buffers are read.
        place: who this worker is.
        expectation: what it knows and wants of the stream.
        timeout_s: how long one wait may take.
        stop: where the consumer's error is noted when it stops early.
    """
    sender = await Greeting(listener, feeder, medium, place, timeout_s).sender()
    channel = sender.channel
    async with _telling(channel, place.rollout_rank, stop):
        begins = await answer_plan(channel, expectation)
        async with aclosing(_Arrivals(channel, sender.memory, begins).batches()) as arriving:
            async for whole in arriving:
                yield whole
                _finish_loads()
        await channel.send(StreamAccepted())


class _Arrivals:
    """The buckets of one stream as they come, checked."""

    def __init__(
        self, channel: ControlChannel, memory: ReceiverMemory, begins: StreamBegins
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._first_byte = begins.first_byte
        self._bucket_bytes = begins.bucket_bytes
        if (
            begins.first_byte + begins.bucket_bytes > memory.buffer_bytes
            or begins.first_byte % ALIGNMENT_BYTES
            or check_bucket_bytes(begins.bucket_bytes) is not None
        ):
            raise self._damaged(f"buckets of {begins.bucket_bytes} bytes from {begins.first_byte}")
        self._unpacker = StreamUnpacker(begins.bucket_bytes)
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
            buffer = await self._memory.fetch(
                channel, body.bucket, self._first_byte, body.filled_bytes
            )
            self._check_contents(body, buffer)
            if not self._memory.in_place:
                await channel.send(BucketReleased(bucket=body.bucket))
                if channel.has_news():
                    # The next bucket travels while this one is loaded.
                    self._ahead = await self._announced()
            channel.stage = "loaded"
            channel.tensor = body.pieces[0].name if body.pieces else ""
            whole = self._unpacker.batch(body.bucket, body.pieces, body.aliases, buffer)
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
        if body.filled_bytes > self._bucket_bytes:
            raise self._damaged(f"{body.filled_bytes} bytes in one bucket")
        self._started += 1
        self._digest.update(message)
        self._memory.start(channel, body.bucket, self._first_byte, body.filled_bytes)
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
