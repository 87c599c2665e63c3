"""The receiving end of one stream.

Rules kept here: nothing is handed on before its checksum was compared; memory is released when the
consumer asks for the next batch, which is when it has loaded this one; the stream is accepted when
all of it is loaded; and whatever ends it early is told to everybody at the other ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Final

import torch
import xxhash

from rollsync.pure.refit import ALIGNMENT_BYTES, RolloutWorker, check_bucket_bytes
from rollsync.pure.refit.control import (
    BucketFilled,
    BucketReleased,
    ControlBody,
    Failed,
    StreamAccepted,
    StreamBegins,
    StreamEnded,
    TensorHashed,
    TensorsOffered,
)
from rollsync.shell.refit.engines.addresses import Listener
from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.engines.batches import ConsumerStop
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct_receiving import DirectReader
from rollsync.shell.refit.engines.errors import (
    PeerRefused,
    TransferError,
    let_down_by,
    name_tensors,
    told_of,
)
from rollsync.shell.refit.engines.greeting import Greeting, ReceivingEnd
from rollsync.shell.refit.engines.lifelines import HeldLifeline
from rollsync.shell.refit.engines.media import ReceiverMedium, ReceiverMemory
from rollsync.shell.refit.engines.opening import Expectation, answer_plan
from rollsync.shell.refit.engines.relaying import Relay
from rollsync.shell.refit.engines.rings import Assembly, StreamRing
from rollsync.shell.refit.engines.unpacking import AnnouncedPart, StreamUnpacker, Stretch

READS_AHEAD: Final = 2
"""How many parts are being read at a time, where that goes on beside this worker."""

_News = AnnouncedPart | TensorsOffered | TensorHashed | StreamEnded


async def receive_stream(
    listener: Listener,
    lifeline: HeldLifeline,
    medium: ReceiverMedium,
    *,
    me: ReceivingEnd,
    expectation: Expectation,
    on_begin: Callable[[StreamBegins], None],
    on_end: Callable[[StreamEnded], None],
    stop: ConsumerStop,
    direct: DirectReader | None,
    relay: Relay | None,
) -> AsyncGenerator[Batch, None]:
    """The batches of the next stream.

    Args:
        listener: where the sender connects.
        lifeline: the sender's, which ends when it dies before it has connected.
        medium: how the sender's buffers are read.
        me: who this worker is.
        expectation: what it knows of the stream.
        on_begin: told how the stream comes, before its first batch.
        on_end: told what the whole of it was, when all has come and is loaded.
        stop: where the consumer's error is noted when it stops early.
        direct: reads what does not come in batches; None: everything does.
        relay: hands the stream on; None: this worker feeds nobody.
    """
    ends = _Ends(relay)
    async with _telling(ends, me, stop):
        if relay is not None:
            relay.connect()
        sender = await Greeting(listener, lifeline, medium, me).sender()
        channel = ends.sender = sender.channel
        begins = await answer_plan(channel, expectation, relay)
        on_begin(begins)
        if direct is not None:
            await direct.open(channel)
        arrivals = _Arrivals(channel, sender.memory, begins, medium.assembly, direct, relay, on_end)
        async with aclosing(arrivals.batches()) as arriving:
            async for whole in arriving:
                yield whole
                _finish_loads()
        await channel.send(StreamAccepted())


class _Arrivals:
    """The buckets of one stream as they come, checked."""

    def __init__(
        self,
        channel: ControlChannel,
        memory: ReceiverMemory,
        begins: StreamBegins,
        assembly: Assembly,
        direct: DirectReader | None,
        relay: Relay | None,
        on_end: Callable[[StreamEnded], None],
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._begins = begins
        self._direct = direct
        self._relay = relay
        self._on_end = on_end
        if (
            begins.first_byte + begins.bucket_bytes * memory.buffers.count > memory.buffers.size
            or begins.first_byte % ALIGNMENT_BYTES
            or check_bucket_bytes(begins.bucket_bytes) is not None
        ):
            raise self._damaged(f"buckets of {begins.bucket_bytes} bytes from {begins.first_byte}")
        self._ring = StreamRing(memory.buffers, begins.first_byte, begins.bucket_bytes)
        self._unpacker = StreamUnpacker(self._ring, assembly)
        self._digest = xxhash.xxh3_128()
        self._buckets = 0
        self._announced_bytes = 0
        # Before which position this worker needs nothing; what it has released, which is less when
        # it relays to a slower one; and so that one release is said at a time.
        self._settled = self._released = 0
        self._releasing = asyncio.Lock()
        # What is announced and not handed on yet; of these, how many are being read; and whether
        # that goes on beside this worker. Where it does not, reading ahead only takes what is to
        # be loaded next out of the cache.
        self._coming: deque[_News] = deque()
        self._started = 0
        self._reads_beside = False

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """The tensors as they become whole; a batch is done with when the next is asked for."""
        relay = self._relay
        if relay is not None:
            await relay.begin(self._channel, self._begins, self._ring.ring, self._release)
        while True:
            news = await self._next()
            if isinstance(news, StreamEnded):
                self._check_end(news)
                if relay is not None:
                    await relay.end(self._channel, news)
                self._on_end(news)
                return
            if isinstance(news, TensorsOffered | TensorHashed):
                await self._take_directly(news)
                continue
            self._check_contents(news)
            if relay is not None:
                await relay.pass_on(news.announcement, news.end)
            whole = self._unpacker.take(news)
            # The next part travels while this one is loaded.
            self._look_ahead()
            if whole:
                self._enter("loaded", name_tensors(name for name, _ in whole))
                yield whole
            self._unpacker.settle(news)
            self._settled = news.needed_from
            await self._release()

    async def _take_directly(self, news: TensorsOffered | TensorHashed) -> None:
        if self._direct is None:
            raise self._channel.unexpected(news)
        await self._direct.take(self._channel, news)

    async def _next(self) -> _News:
        """What was announced next; if that is a part, its bytes are there."""
        channel = self._channel
        if not self._coming:
            self._enter("waited for a bucket")
            self._note(*await channel.receive())
        self._start_reading(1)
        self._look_ahead()
        news = self._coming.popleft()
        self._started -= 1
        if isinstance(news, AnnouncedPart):
            self._enter(
                "read a bucket", name_tensors(piece.name for piece in news.announcement.pieces)
            )
            for stretch in news.stretches:
                await self._memory.fetch(channel, self._ring.place(stretch.begin))
        return news

    def _look_ahead(self) -> None:
        """Begin to read what is announced by now, a few parts at a time."""
        if not self._reads_beside:
            return
        while len(self._coming) < READS_AHEAD and (news := self._channel.receive_now()) is not None:
            self._note(*news)
        self._start_reading(READS_AHEAD)

    def _start_reading(self, most: int) -> None:
        """Let so many of the parts that are announced be on their way."""
        while self._started < min(len(self._coming), most):
            news = self._coming[self._started]
            if isinstance(news, AnnouncedPart):
                self._reads_beside = False
                for stretch in news.stretches:
                    self._start(stretch)
            self._started += 1

    def _start(self, stretch: Stretch) -> None:
        # Those that this worker relays to find everything in its buffers.
        target = None if self._relay is not None else self._unpacker.place_for(stretch)
        place = self._ring.place(stretch.begin)
        size = stretch.end - stretch.begin
        if self._memory.start(self._channel, place, size, target):
            self._reads_beside = True

    def _note(self, body: ControlBody, message: bytes) -> None:
        """Check an announcement against those before it."""
        ended = bool(self._coming) and isinstance(self._coming[-1], StreamEnded)
        if isinstance(body, StreamEnded | TensorsOffered | TensorHashed) and not ended:
            self._coming.append(body)
            return
        if not isinstance(body, BucketFilled) or ended:
            raise self._channel.unexpected(body)
        ring = self._ring.ring
        if body.bucket == self._buckets and self._may_close_bucket():
            self._buckets += 1
            self._announced_bytes = 0
        if (
            body.bucket != self._buckets - 1
            or body.begin_bytes != self._announced_bytes
            or not body.begin_bytes <= body.filled_bytes <= ring.bucket_bytes
            or not ring.may_fill(ring.position(body.bucket, body.filled_bytes), self._released)
        ):
            raise self._channel.unexpected(body)
        self._announced_bytes = body.filled_bytes
        self._digest.update(message)
        self._coming.append(self._unpacker.expect(body))

    def _may_close_bucket(self) -> bool:
        """Whether the current bucket is full, but for padding."""
        left = self._ring.ring.bucket_bytes - self._announced_bytes
        return not self._buckets or left < ALIGNMENT_BYTES

    async def _release(self) -> None:
        """Let the sender fill again what nobody needs any more, here or further on."""
        async with self._releasing:
            relay, position = self._relay, self._settled
            if relay is not None:
                position = relay.released_by_all(position)
            if position == self._released:
                return
            self._released = position
            bucket, released_bytes = self._ring.ring.bucket_at(position)
            await self._channel.send(BucketReleased(bucket=bucket, released_bytes=released_bytes))

    def _check_end(self, ended: StreamEnded) -> None:
        self._unpacker.check_complete()
        if self._direct is not None:
            self._direct.check_end(self._channel)
        received = StreamEnded(
            buckets=self._buckets,
            tensors=self._unpacker.tensors,
            payload_bytes=self._unpacker.payload_bytes,
            digest=self._digest.hexdigest(),
        )
        if ended != received:
            raise self._damaged(f"sent {ended}, received {received}")

    def _check_contents(self, part: AnnouncedPart) -> None:
        """Check the part, and copy what the ring cannot hold of a tensor while it is at hand."""
        announced = part.announcement
        if announced.checksum is None:
            self._unpacker.gather(part, None)
            return
        checksum = xxhash.xxh3_64()
        self._unpacker.gather(part, checksum)
        found = checksum.hexdigest()
        if found != announced.checksum:
            raise self._damaged(
                f"bucket {announced.bucket} has checksum {found} from byte"
                f" {announced.begin_bytes} to {announced.filled_bytes}, sent as"
                f" {announced.checksum}"
            )

    def _enter(self, stage: str, tensor: str = "") -> None:
        self._channel.enter(stage, tensor)

    def _damaged(self, what: str) -> PeerRefused:
        return self._channel.error(
            PeerRefused,
            f"the stream of {self._channel.peer} is damaged: {what}",
            remedy="run the sync again; if it repeats, check the host's memory",
        )


class _Ends:
    """The other ends of one stream: its sender, as soon as it has come, and whom it goes on to."""

    def __init__(self, relay: Relay | None) -> None:
        self.relay = relay
        self.sender: ControlChannel | None = None

    def where(self, error: BaseException) -> tuple[str, str]:
        """The stage and the tensor at which an error came."""
        if isinstance(error, TransferError):
            return error.stage, error.tensor
        return ("connected", "") if self.sender is None else (self.sender.stage, self.sender.tensor)

    async def tell(self, failed: Failed) -> None:
        """Tell all that are connected, and end the connections."""
        if self.sender is not None:
            await self.sender.bid_farewell(failed)
        if self.relay is not None:
            await self.relay.tell(failed)

    def close(self) -> None:
        """End the connections."""
        for end in (self.sender, self.relay):
            if end is not None:
                end.close()


@asynccontextmanager
async def _telling(ends: _Ends, me: ReceivingEnd, stop: ConsumerStop) -> AsyncIterator[None]:
    """Tell the other ends of whatever ends the stream early, and close the connections."""
    try:
        yield
    except BaseException as error:
        raised = error
        if isinstance(error, TransferError) and isinstance(me.sender, RolloutWorker):
            raised = let_down_by(str(me.sender), error)
        if ends.relay is not None:
            await ends.relay.stop()
        stage, tensor = ends.where(error)
        here = Failed(
            worker=me.name,
            stage=stage,
            tensor=stop.tensor(error) or tensor,
            message=stop.describe(error),
        )
        await ends.tell(told_of(raised, here))
        if raised is error:
            raise
        raise raised from error
    if ends.relay is not None:
        await ends.relay.stop()
    ends.close()


def _finish_loads() -> None:
    """Wait for copies from the buffer that a device still has queued."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
