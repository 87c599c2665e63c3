"""A rollout worker that hands a stream on, while it receives it, to the workers that it feeds.

They read each part of a bucket from this worker's own buffers, where it lies at the same position
as in the sender's; what is announced is passed on as it came, once the part was checked.

Rules kept here: a position is released to the sender when this worker and all that it feeds have
released it; a failure on one side of this worker reaches the other at once, whatever this worker
waits for, and is not this worker's own; and a receiver has a deadline only while it owes something.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, NoReturn, TypeVar

from rollsync.pure.refit.control import (
    BucketFilled,
    Failed,
    PlanAnswered,
    PlanDeclared,
    PlanOffered,
    StreamAccepted,
    StreamBegins,
    StreamEnded,
)
from rollsync.pure.refit.relays import differs, released_by_all
from rollsync.pure.refit.ring import Ring
from rollsync.shell.refit.engines.channel import FAREWELL_S, ControlChannel
from rollsync.shell.refit.engines.connections import (
    Connections,
    Introduction,
    Receiver,
    position_released,
)
from rollsync.shell.refit.engines.errors import PeerLost, TransferError, let_down_by
from rollsync.shell.refit.engines.kept_errors import let_go
from rollsync.shell.refit.engines.media import SenderMemory

LOOK_S: Final = 0.05
"""How often this worker looks for its sender while it waits for its receivers."""

_T = TypeVar("_T")


class Relay:
    """Hands one stream on.

    Args:
        memory: this worker's own buffers, into which it reads.
        me: who it is.
        receivers: whom it feeds.
    """

    def __init__(
        self, memory: SenderMemory, me: Introduction, receivers: Sequence[Receiver]
    ) -> None:
        self._memory = memory
        self._receivers = receivers
        self._connections = Connections(memory, me)
        self._answers: list[PlanAnswered] = []
        self._released = [0] * len(receivers)
        self._announced = 0
        self._ended = False
        self._tasks: list[asyncio.Task[None]] = []
        self._connecting: asyncio.Task[None] | None = None
        self._followers: list[asyncio.Task[None]] = []

    def connect(self) -> None:
        """Begin to connect to the receivers, which wait for that beside this worker."""
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(self._connections.open(self._receivers))
        self._tasks = [self._connecting, loop.create_task(self._memory.serve())]

    async def offer(self, sender: ControlChannel, offered: PlanOffered) -> Sequence[PlanAnswered]:
        """What the receivers answer to what the sender offers.

        Raises:
            TransferError: one of them cannot be reached, or the sender is gone meanwhile.
        """
        await _beside(sender, self._offer(offered))
        return self._answers

    async def _offer(self, offered: PlanOffered) -> None:
        if self._connecting is not None:
            await self._connecting
        self._connections.enter("compared the declarations")
        for channel in self._connections.channels:
            await channel.send(offered)
        for channel in self._connections.channels:
            with _answering_for(channel):
                answer, _ = await channel.receive()
                if not isinstance(answer, PlanAnswered):
                    raise channel.unexpected(answer)
            self._answers.append(answer)

    async def explain_difference(self, sender: ControlChannel, offered: PlanOffered) -> NoReturn:
        """Pass the sender's declaration on to a receiver that has another: it finds the difference,
        and gives up with it."""
        declared, _ = await sender.receive()
        if not isinstance(declared, PlanDeclared):
            raise sender.unexpected(declared)
        for channel, answer in zip(self._connections.channels, self._answers, strict=True):
            if differs(offered.digest, answer):
                with _answering_for(channel):
                    await channel.send(declared)
                    body, _ = await _beside(sender, channel.receive())
                    raise channel.unexpected(body)
        raise sender.unexpected(declared)

    async def begin(
        self,
        sender: ControlChannel,
        begins: StreamBegins,
        ring: Ring,
        on_release: Callable[[], Awaitable[None]],
    ) -> None:
        """Tell the receivers how the stream comes, and follow what they release.

        Args:
            sender: told at once of the failure of a receiver.
            begins: what the sender said.
            ring: of the stream, here as well as there.
            on_release: called when a receiver has released more.
        """
        loop = asyncio.get_running_loop()
        sender.between_looks(self._memory.progress)
        for index, channel in enumerate(self._connections.channels):
            await channel.send(begins)
            # What is said between two ends while this one waits for a third is not waited for.
            channel.between_looks(None)
            channel.expect(False)
            following = self._follow(sender, index, channel, ring, on_release)
            self._followers.append(loop.create_task(following))
        self._connections.enter("waited for a bucket's release")
        self._tasks += self._followers

    async def _follow(
        self,
        sender: ControlChannel,
        index: int,
        channel: ControlChannel,
        ring: Ring,
        on_release: Callable[[], Awaitable[None]],
    ) -> None:
        """Take a receiver's releases until it accepts the stream."""
        try:
            while await self._released_more(index, channel, ring):
                # A sender that is gone is noticed by whoever waits for it.
                with contextlib.suppress(TransferError):
                    await on_release()
        except Exception as error:
            sender.interrupt(error)
            raise

    async def _released_more(self, index: int, channel: ControlChannel, ring: Ring) -> bool:
        """Take what a receiver says next; False when it has accepted the stream."""
        with _answering_for(channel):
            body, _ = await channel.receive()
            before = self._released[index]
            if isinstance(body, StreamAccepted) and self._ended and before == self._announced:
                return False
            released = position_released(
                channel, body, ring, before=before, announced=self._announced
            )
        self._released[index] = released
        channel.expect(self._ended or released < self._announced)
        return True

    def released_by_all(self, own: int) -> int:
        """What may be released to the sender when this worker has released what lies before
        `own`."""
        return released_by_all(own, self._released)

    async def pass_on(self, part: BucketFilled, end: int) -> None:
        """Announce a part, which has come and was checked, to the receivers.

        Args:
            part: as it was announced.
            end: the position at which it ends.
        """
        self._announced = end
        await self._say(part)

    async def end(self, sender: ControlChannel, ended: StreamEnded) -> None:
        """Pass the end on, and wait until every receiver has accepted the stream."""
        self._ended = True
        await self._say(ended)
        self._connections.enter("waited for the stream's acceptance")
        await _beside(sender, asyncio.gather(*self._followers))

    async def _say(self, body: BucketFilled | StreamEnded) -> None:
        for channel, follower in zip(self._connections.channels, self._followers, strict=True):
            if follower.done():
                follower.result()
            channel.expect(True)
            try:
                with _answering_for(channel):
                    await channel.send(body)
            except PeerLost:
                # Its last words are the follower's to hear.
                await asyncio.wait([follower], timeout=FAREWELL_S)
                if follower.done():
                    follower.result()
                raise

    async def stop(self) -> None:
        """End what goes on beside this worker; the connections stay."""
        if self._connecting is not None:
            # Who is connected to can be told why.
            await asyncio.wait([self._connecting], timeout=FAREWELL_S)
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if outcome is not None:
                # It came by way of this object, which has its task.
                let_go(outcome)

    async def tell(self, failed: Failed) -> None:
        """Tell the receivers why the stream ends early."""
        await self._connections.tell(failed)

    def close(self) -> None:
        """End the connections."""
        self._connections.close()


@contextlib.contextmanager
def _answering_for(receiver: ControlChannel) -> Iterator[None]:
    """What a receiver is late with, or does wrong, is its failure and not this worker's."""
    try:
        yield
    except TransferError as error:
        blamed = let_down_by(receiver.peer, error)
        if blamed is error:
            raise
        raise blamed from error


async def _beside(sender: ControlChannel, work: Awaitable[_T]) -> _T:
    """Do `work`, unless the sender gives up or goes meanwhile; it has nothing else to say."""
    working = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait([working], timeout=LOOK_S)
            if done:
                return working.result()
            sender.take_in()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
