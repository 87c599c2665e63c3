"""What is waited for ends when a stop is asked for, and has ended when the wait does."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rollsync.shell.rollout.stopping import asked_by, done_before, result_before


class Work:
    """Ends when it is let go; takes a moment to end when it is cancelled."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.did: list[str] = []

    async def __call__(self) -> None:
        self.did.append("began")
        try:
            await self.go.wait()
            self.did.append("done")
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.did.append("cleaned up")
            raise


@pytest.mark.asyncio
async def test_work_that_ends_is_done() -> None:
    work = Work()
    work.go.set()
    assert await done_before(asyncio.Event(), work())
    assert work.did == ["began", "done"]


@pytest.mark.asyncio
async def test_a_stop_cancels_and_waits_for_the_end() -> None:
    stop, work = asyncio.Event(), Work()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    assert not await done_before(stop, work())
    assert work.did == ["began", "cleaned up"]


@pytest.mark.asyncio
async def test_whoever_is_cancelled_leaves_nothing_running() -> None:
    work = Work()
    waiting = asyncio.create_task(done_before(asyncio.Event(), work()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.did == ["began", "cleaned up"]


@pytest.mark.asyncio
async def test_a_failure_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        await done_before(asyncio.Event(), fail())


@pytest.mark.asyncio
async def test_work_has_its_result_or_has_been_cancelled() -> None:
    async def answer() -> int:
        return 7

    stop, work = asyncio.Event(), Work()
    assert await result_before(stop, answer()) == 7
    asyncio.get_running_loop().call_soon(stop.set)
    cancelled: object = await result_before(stop, work())
    assert cancelled is None
    assert work.did == ["began", "cleaned up"]


@pytest.mark.asyncio
async def test_a_second_signal_asks_for_more_than_the_first_whichever_they_are() -> None:
    first, second = asked_by(signal.SIGUSR1, signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    await first.wait()
    await asyncio.sleep(0)
    assert not second.is_set()
    os.kill(os.getpid(), signal.SIGUSR2)
    await second.wait()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        asyncio.get_running_loop().remove_signal_handler(number)
