"""Cancels a piece of work at a chosen one of its awaits, as `Task.cancel` would just then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import TypeVar

from rollsync.shell.rollout.barrier import DataPlaneCheckpointBarrier

T = TypeVar("T")


class CancelledAt:
    """Awaits `work`, and cancels the task that does so as it is suspended for the `at`-th time
    (from 0). Only awaits that really suspend count: at the others no cancellation can arrive."""

    def __init__(self, work: Coroutine[object, None, T], at: int) -> None:
        self._work = work
        self._at = at
        self.suspensions = 0

    def __await__(self) -> Generator[object, None, object]:
        steps = self._work.__await__()
        step: Callable[[], object] = partial(next, steps)
        while True:
            try:
                waits_for = step()
            except StopIteration as ended:
                return ended.value
            task = asyncio.current_task()
            if self.suspensions == self._at and task is not None:
                task.cancel()
            self.suspensions += 1
            try:
                yield waits_for
                step = partial(next, steps)
            except BaseException as error:
                step = partial(steps.throw, error)


async def is_cancelled_at(at: int, work: Coroutine[object, None, object]) -> bool:
    """Run `work` in a task and cancel it at its `at`-th await; False when it has fewer awaits than
    that, and has ended."""

    async def run() -> None:
        await CancelledAt(work, at)

    try:
        await asyncio.create_task(run())
    except asyncio.CancelledError:
        return True
    return False


async def is_free(barrier: DataPlaneCheckpointBarrier) -> bool:
    """Whether a checkpoint gets in at once: nobody is inside, and nobody waits."""

    async def enter() -> None:
        async with barrier.checkpoint():
            pass

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    free = entering.done()
    entering.cancel()
    await asyncio.wait({entering})
    return free
