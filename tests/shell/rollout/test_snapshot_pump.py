"""The pump: every interval, a failure budget, and the moment of the last snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rollsync.pure.config import CheckpointingConfig
from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from rollsync.pure.rollout.checkpointing import RolloutCheckpointSaveResult
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.errors import DataPlaneLost
from rollsync.shell.rollout.snapshot_pump import RolloutSaveError, SnapshotPump
from tests.pure.rollout.events_kit import train
from tests.shell.rollout.world import PARTITION, World

FAST = CheckpointingConfig(snapshot_interval_s=0.01, max_consecutive_failures=2)


def pump(
    world: World,
    saving: CheckpointingConfig,
    *,
    margin_s: float = 0.0,
    longest_step_s: Callable[[], float] = lambda: 0.0,
) -> SnapshotPump:
    return SnapshotPump(
        world.snapshotter,
        saving,
        run_started_s=asyncio.get_running_loop().time(),
        longest_step_s=longest_step_s,
        deadline_margin_s=margin_s,
    )


async def until(world: World, call: str, count: int) -> None:
    while world.archive.calls.count(call) < count:
        await asyncio.sleep(0.005)


async def change(world: World) -> None:
    """Something happened: the next save is not skipped."""
    async with world.barrier.mutation(CheckpointMutationKind.OTHER):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_it_saves_every_interval_until_stopped(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    stop = asyncio.Event()
    running = asyncio.create_task(pump(world, FAST).run(stop))
    for count in (1, 2, 3):
        await until(world, "prune", count)
        await change(world)
    stop.set()
    await running
    assert len(world.archive.bundles()) >= 3


@pytest.mark.parametrize("interval_s", [1.0, 60.0])
@pytest.mark.asyncio
async def test_it_stops_without_waiting_for_the_interval(tmp_path: Path, interval_s: float) -> None:
    world = World(tmp_path)
    stop = asyncio.Event()
    saving = CheckpointingConfig(snapshot_interval_s=interval_s)
    running = asyncio.create_task(pump(world, saving).run(stop))
    await asyncio.sleep(0)
    stop.set()
    await running
    assert world.archive.calls == []


@pytest.mark.asyncio
async def test_io_errors_are_tolerated_up_to_the_limit_in_a_row(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    stop = asyncio.Event()
    running = asyncio.create_task(pump(world, FAST).run(stop))
    disk_full = OSError(28, "no space left")
    for _ in range(2):  # Each time two failures, then a success: never three in a row.
        world.archive.failing = {"begin": disk_full}
        begun = world.archive.calls.count("begin")
        await until(world, "begin", begun + 2)
        world.archive.failing = {}
        await until(world, "prune", world.archive.calls.count("prune") + 1)
        await change(world)
    assert not running.done()
    world.archive.failing = {"begin": disk_full}
    with pytest.raises(RolloutSaveError, match="3 snapshots in a row failed") as caught:
        await running
    assert caught.value.result.reason is Reason.IO_ERROR
    assert repr(caught.value.__cause__) == repr(disk_full)


@pytest.mark.asyncio
async def test_a_step_that_is_being_committed_is_waited_out(tmp_path: Path) -> None:
    """A whole interval later the next step may be."""
    world = World(tmp_path)
    await world.ready(0)
    claim, opened, committed = train(world.state, "e0p0")
    await world.do(claim, opened)
    world.archive.anchors.add(1)
    stop = asyncio.Event()
    saving = asyncio.create_task(pump(world, CheckpointingConfig())._save(stop))
    while not world.trace.trace.events:
        await asyncio.sleep(0)
    assert not saving.done()
    await world.do(committed)
    async with asyncio.timeout(20):
        await saving
    assert len(world.archive.bundles()) == 1


@pytest.mark.asyncio
async def test_a_step_that_is_being_committed_for_long_keeps_nobody_from_stopping(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.ready(0)
    await world.do(*train(world.state, "e0p0")[:2])
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(20):
        await pump(world, CheckpointingConfig())._save(stop)
    assert world.archive.bundles() == []


@pytest.mark.asyncio
async def test_an_invariant_error_stops_the_run_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    await world.plane.clear(PARTITION, ["e0p0/1"])
    with pytest.raises(RolloutSaveError, match="failed for good") as caught:
        await pump(world, FAST).run(asyncio.Event())
    assert caught.value.result.reason is Reason.INVARIANT_ERROR
    assert world.archive.calls.count("begin") == 1


@pytest.mark.asyncio
async def test_rows_that_are_lost_stop_the_run_at_once_and_by_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    world.archive.failing = {"begin": DataPlaneLost("a storage unit died")}
    with pytest.raises(DataPlaneLost, match="a storage unit died"):
        await pump(world, FAST).run(asyncio.Event())
    assert world.archive.calls.count("begin") == 1


@pytest.mark.asyncio
async def test_it_says_when_the_last_snapshot_is_due_and_ends(tmp_path: Path) -> None:
    world = World(tmp_path)
    saving = CheckpointingConfig(snapshot_interval_s=100, checkpoint_must_save_by_s=60)
    pumping = pump(world, saving, margin_s=59.99)
    await pumping.run(asyncio.Event())
    assert pumping.last_is_due.is_set()
    assert world.archive.calls == []


@pytest.mark.asyncio
async def test_with_rare_checkpoints_the_last_snapshot_is_given_a_step_more(tmp_path: Path) -> None:
    """It may have to wait for the end of the step under way."""
    world = World(tmp_path)
    saving = CheckpointingConfig(
        snapshot_interval_s=1000, checkpoint_must_save_by_s=500, trainer_every_steps=5
    )
    pumping = pump(world, saving, margin_s=1, longest_step_s=lambda: 499.0)
    await pumping.run(asyncio.Event())
    assert pumping.last_is_due.is_set()


@pytest.mark.asyncio
async def test_long_before_the_deadline_the_snapshots_are_periodic(tmp_path: Path) -> None:
    """The deadline counts from the start of the run, not from that of the machine."""
    world = World(tmp_path)
    await world.ready(0)
    saving = CheckpointingConfig(snapshot_interval_s=0.01, checkpoint_must_save_by_s=60)
    pumping, stop = pump(world, saving), asyncio.Event()
    running = asyncio.create_task(pumping.run(stop))
    async with asyncio.timeout(20):
        await until(world, "prune", 1)
        await change(world)
        await until(world, "prune", 2)
    stop.set()
    await running
    assert not pumping.last_is_due.is_set()


@pytest.mark.asyncio
async def test_a_step_that_turns_out_long_brings_the_last_snapshot_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollsync.shell.rollout.snapshot_pump.LOOK_AGAIN_S", 0.001)
    world = World(tmp_path)
    saving = CheckpointingConfig(
        snapshot_interval_s=1000, checkpoint_must_save_by_s=500, trainer_every_steps=5
    )
    steps_s = iter([0.0, 1.0, 2.0, 600.0])
    pumping = pump(world, saving, longest_step_s=lambda: next(steps_s))
    async with asyncio.timeout(20):
        await pumping.run(asyncio.Event())
    assert pumping.last_is_due.is_set()
    assert list(steps_s) == []
    assert world.archive.calls == []


@pytest.mark.asyncio
async def test_only_a_save_forgives_the_failures_before_it(tmp_path: Path) -> None:
    pumping = pump(World(tmp_path), FAST)
    failed = RolloutCheckpointSaveResult(saved=False, reason=Reason.TIMEOUT)
    skipped = RolloutCheckpointSaveResult(saved=False, reason=Reason.NO_DATA_PLANE_MUTATIONS)
    for result in (
        failed,
        failed,
        RolloutCheckpointSaveResult(saved=True, reason=Reason.COMPLETED),
    ):
        pumping._judge(result)
    for result in (failed, skipped, failed, skipped):
        pumping._judge(result)
    with pytest.raises(RolloutSaveError, match="3 snapshots in a row failed"):
        pumping._judge(failed)
