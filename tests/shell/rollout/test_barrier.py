"""The barrier: who may be inside with whom, what a section is worth, and cancellation anywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from rollsync.shell.rollout.barrier import (
    CheckpointMutationKind,
    DataPlaneCheckpointBarrier,
    DataPlaneMutationCut,
    DataPlaneMutationSection,
)
from rollsync.shell.rollout.errors import BarrierMisuse
from tests.shell.rollout.cancelling import is_free

OTHER = CheckpointMutationKind.OTHER


async def turns(count: int = 5) -> None:
    """Let every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


class Visitor:
    """A task that enters, writes down when, and stays until it is let go."""

    def __init__(self, barrier: DataPlaneCheckpointBarrier, name: str, log: list[str]) -> None:
        self.may_leave = asyncio.Event()
        self._log = log
        self._name = name
        enter = self._checkpoint if name.startswith("cut") else self._mutation
        self.task = asyncio.create_task(enter(barrier))

    async def _mutation(self, barrier: DataPlaneCheckpointBarrier) -> None:
        async with barrier.mutation(OTHER):
            await self._stay()

    async def _checkpoint(self, barrier: DataPlaneCheckpointBarrier) -> None:
        async with barrier.checkpoint():
            await self._stay()

    async def _stay(self) -> None:
        self._log.append(f"+{self._name}")
        try:
            await self.may_leave.wait()
        finally:
            self._log.append(f"-{self._name}")

    async def leave(self) -> None:
        self.may_leave.set()
        await self.task
        await turns()

    async def cancel(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task
        await turns()


async def visitors(
    barrier: DataPlaneCheckpointBarrier, log: list[str], *names: str
) -> list[Visitor]:
    made = []
    for name in names:
        made.append(Visitor(barrier, name, log))
        await turns()
    return made


@pytest.mark.asyncio
async def test_mutations_run_together_and_a_checkpoint_alone() -> None:
    barrier, log = DataPlaneCheckpointBarrier(), list[str]()
    a, b, cut, c, d = await visitors(barrier, log, "a", "b", "cut", "c", "d")
    assert log == ["+a", "+b"], "later mutations wait behind a waiting checkpoint"
    await a.leave()
    assert log == ["+a", "+b", "-a"]
    await b.leave()
    assert log[3:] == ["-b", "+cut"]
    await cut.leave()
    assert log[5:] == ["-cut", "+c", "+d"]
    await c.leave()
    await d.leave()
    assert await is_free(barrier)


@pytest.mark.asyncio
async def test_mutations_that_waited_run_before_the_next_checkpoint() -> None:
    barrier, log = DataPlaneCheckpointBarrier(), list[str]()
    first, a, second, b = await visitors(barrier, log, "cut1", "a", "cut2", "b")
    for visitor in (first, a, second, b):
        await visitor.leave()
    assert log == ["+cut1", "-cut1", "+a", "-a", "+cut2", "-cut2", "+b", "-b"]


@pytest.mark.asyncio
async def test_the_version_counts_ended_mutations_also_failed_and_cancelled_ones() -> None:
    barrier = DataPlaneCheckpointBarrier()
    async with barrier.mutation(OTHER):
        assert barrier.mutation_version == 0
    with pytest.raises(ZeroDivisionError):
        async with barrier.mutation(OTHER):
            raise ZeroDivisionError
    assert barrier.mutation_version == 2
    (inside,) = await visitors(barrier, [], "a")
    await inside.cancel()
    async with barrier.checkpoint() as cut:
        assert cut.mutation_version == barrier.mutation_version == 3
    assert barrier.mutation_version == 3, "a checkpoint changes nothing"


@pytest.mark.asyncio
async def test_a_section_dies_with_its_block() -> None:
    barrier = DataPlaneCheckpointBarrier()
    async with barrier.mutation(CheckpointMutationKind.SIBLING_SEAL) as section:
        section.require_live(barrier)
        with pytest.raises(BarrierMisuse, match="another barrier"):
            section.require_live(DataPlaneCheckpointBarrier())
    with pytest.raises(BarrierMisuse, match="sibling_seal section has ended"):
        section.require_live(barrier)


@pytest.mark.asyncio
async def test_a_cut_dies_with_its_block_also_when_that_raises() -> None:
    barrier = DataPlaneCheckpointBarrier()
    cuts: list[DataPlaneMutationCut] = []

    async def fail_inside() -> None:
        async with barrier.checkpoint() as cut:
            cuts.append(cut)
            cut.require_live(barrier)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()
    with pytest.raises(BarrierMisuse, match="cut has ended"):
        cuts[0].require_live(barrier)
    assert await is_free(barrier)


@pytest.mark.asyncio
@pytest.mark.parametrize("outer", ["mutation", "checkpoint"])
@pytest.mark.parametrize("inner", ["mutation", "checkpoint"])
async def test_entering_again_is_an_error_and_not_a_wait(outer: str, inner: str) -> None:
    barrier = DataPlaneCheckpointBarrier()

    async def enter(which: str, body: Callable[[], Awaitable[None]]) -> None:
        if which == "mutation":
            async with barrier.mutation(OTHER):
                await body()
        else:
            async with barrier.checkpoint():
                await body()

    async def nothing() -> None:
        return

    async def again() -> None:
        with pytest.raises(BarrierMisuse, match="wait for itself"):
            await enter(inner, nothing)

    await enter(outer, again)
    assert await is_free(barrier)
    await enter(inner, nothing)


@pytest.mark.asyncio
async def test_another_task_may_use_the_section_while_it_lives() -> None:
    barrier = DataPlaneCheckpointBarrier()

    async def use(section: DataPlaneMutationSection) -> None:
        section.require_live(barrier)

    async with barrier.mutation(OTHER) as section:
        await asyncio.gather(use(section), use(section))
    assert barrier.mutation_version == 1


@pytest.mark.asyncio
async def test_a_cancelled_waiting_checkpoint_lets_the_mutations_behind_it_in() -> None:
    barrier, log = DataPlaneCheckpointBarrier(), list[str]()
    a, cut, b = await visitors(barrier, log, "a", "cut", "b")
    await cut.cancel()
    assert log == ["+a", "+b"]
    await a.leave()
    await b.leave()
    assert await is_free(barrier)


@pytest.mark.asyncio
async def test_a_cancelled_waiting_mutation_leaves_nothing() -> None:
    barrier, log = DataPlaneCheckpointBarrier(), list[str]()
    cut, a, b = await visitors(barrier, log, "cut", "a", "b")
    await a.cancel()
    await cut.leave()
    assert log == ["+cut", "-cut", "+b"]
    await b.leave()
    assert await is_free(barrier)
    assert barrier.mutation_version == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("waiter", ["a", "cut2"])
@pytest.mark.parametrize("cancel_first", [True, False])
async def test_cancelled_in_the_turn_in_which_it_is_admitted(
    waiter: str, cancel_first: bool
) -> None:
    barrier, log = DataPlaneCheckpointBarrier(), list[str]()
    may_leave = asyncio.Event()

    async def hold_and_cancel() -> None:
        # No await between leaving and cancelling, so the waiting task sees both at once.
        async with barrier.checkpoint():
            await may_leave.wait()
            if cancel_first:
                waiting.task.cancel()
        if not cancel_first:
            waiting.task.cancel()

    holder = asyncio.create_task(hold_and_cancel())
    await turns()
    waiting, behind = await visitors(barrier, log, waiter, "cut3")
    may_leave.set()
    await holder
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
    await turns()
    assert log == ["+cut3"]
    await behind.leave()
    assert await is_free(barrier)


@pytest.mark.asyncio
async def test_cancelled_inside_gives_the_place_back() -> None:
    barrier, log = DataPlaneCheckpointBarrier(), list[str]()
    cut, a, cut2 = await visitors(barrier, log, "cut1", "a", "cut2")
    await cut.cancel()
    await a.cancel()
    assert log == ["+cut1", "-cut1", "+a", "-a", "+cut2"]
    await cut2.leave()
    assert await is_free(barrier)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(60))
async def test_random_crowds_with_cancellations_keep_the_rules(seed: int) -> None:
    """Every await of every visitor is a place where some run cancels it."""
    dice = random.Random(seed)
    barrier = DataPlaneCheckpointBarrier()
    inside = {"mutations": 0, "cuts": 0}
    most = {"mutations": 0}

    async def visit(exclusive: bool, stay: int) -> None:
        mine = "cuts" if exclusive else "mutations"
        entry = barrier.checkpoint() if exclusive else barrier.mutation(OTHER)
        async with entry:
            inside[mine] += 1
            try:
                for _ in range(stay):
                    assert inside["cuts"] <= 1
                    assert not (inside["cuts"] and inside["mutations"])
                    most["mutations"] = max(most["mutations"], inside["mutations"])
                    await asyncio.sleep(0)
            finally:
                inside[mine] -= 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(60):
        tasks.append(asyncio.create_task(visit(dice.random() < 0.3, dice.randrange(1, 5))))
        if dice.random() < 0.4:
            dice.choice(tasks).cancel()
        await turns(dice.randrange(3))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
    assert await is_free(barrier)
    assert most["mutations"] > 1, "the crowd never had two mutations inside: it shows nothing"


@pytest.mark.asyncio
async def test_only_a_task_enters() -> None:
    """A callback of the loop is none, and could not be told from another one that is inside."""
    barrier = DataPlaneCheckpointBarrier()
    refused: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def enter() -> None:
        try:
            barrier.checkpoint().__aenter__().__await__().__next__()
        except (BarrierMisuse, StopIteration) as error:
            refused.set_result(error)

    asyncio.get_running_loop().call_soon(enter)
    assert isinstance(await refused, BarrierMisuse)
    assert await is_free(barrier)


@pytest.mark.asyncio
async def test_telemetry_counts_kinds_waits_and_holds_since_the_last_reading() -> None:
    barrier = DataPlaneCheckpointBarrier()
    began_s = asyncio.get_running_loop().time()
    cut, waiting = await visitors(barrier, [], "cut", "a")
    await asyncio.sleep(0.02)
    await cut.leave()
    await waiting.leave()
    took_s = asyncio.get_running_loop().time() - began_s
    seen = barrier.take_telemetry()
    assert seen.mutations == {OTHER: 1}
    assert seen.mutation_wait_s <= took_s
    assert seen.checkpoint_hold_s <= took_s
    assert 0 <= seen.checkpoint_wait_s <= took_s - seen.checkpoint_hold_s
    assert seen.checkpoints == 1
    assert 0 < seen.longest_mutation_wait_s <= seen.mutation_wait_s
    assert 0 < seen.longest_checkpoint_hold_s <= seen.checkpoint_hold_s
    assert barrier.take_telemetry().mutations == {}
