"""The last save before a run ends, with and without a deadline and a checkpoint to lie under."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from rollsync.pure.rollout.events import GroupsClaimed, OptimizerCommitOpened, StepCommitted
from rollsync.shell.rollout.last_save import LastSaveEnd, save_last
from rollsync.shell.rollout.snapshot_pump import RolloutSaveError
from rollsync.shell.rollout.train_pump import CheckpointFailed
from tests.shell.rollout.world import PARTITION, World

DISK_FULL = OSError(28, "No space left on device")
SAVED = LastSaveEnd(saved=True, how="last snapshot: completed")
CHECKPOINTED = LastSaveEnd(saved=True, how="the last step has its checkpoint")


class Training:
    """A train pump in a step, which ends when it is told to and the step has ended."""

    def __init__(self, world: World, *, in_long_step: bool = False) -> None:
        self.world = world
        self.told = asyncio.Event()
        self.may_end = asyncio.Event()
        if not in_long_step:
            self.may_end.set()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.told.wait()
        await self.may_end.wait()

        async def write(path: Path) -> None:
            (path / "weights").write_bytes(b"")

        assert (await self.world.snapshotter.save_trainer_checkpoint(write)).saved


async def after_step_1(root: Path) -> World:
    """Step 1 is trained, and nobody has saved its checkpoint."""
    world = World(root)
    await world.ready(0, 1)
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0",)), OptimizerCommitOpened(step=1))
    await world.do(StepCommitted(step=1, trainer_version=1))
    return world


async def last(
    world: World, training: Training, *, left_s: float | None, step_timeout_s: float = 60.0
) -> LastSaveEnd:
    until_s = None if left_s is None else asyncio.get_running_loop().time() + left_s
    try:
        return await save_last(
            world.snapshotter,
            training.task,
            stop_after_step=training.told.set,
            train_steps=lambda: world.cell.state.progress.train_steps,
            until_s=until_s,
            step_timeout_s=step_timeout_s,
        )
    finally:
        training.task.cancel()


@pytest.mark.parametrize("left_s", [None, 60.0], ids=["no deadline", "deadline"])
@pytest.mark.asyncio
async def test_nothing_has_changed_and_a_snapshot_is_forced(
    left_s: float | None, tmp_path: Path
) -> None:
    world = World(tmp_path)
    await world.ready(0)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    training = Training(world, in_long_step=True)
    assert await last(world, training, left_s=left_s) == SAVED
    assert training.told.is_set()
    assert len(world.archive.bundles()) == 2


@pytest.mark.parametrize("left_s", [None, 60.0], ids=["no deadline", "deadline"])
@pytest.mark.asyncio
async def test_a_step_without_a_checkpoint_gets_one(left_s: float | None, tmp_path: Path) -> None:
    world = await after_step_1(tmp_path)
    training = Training(world)
    assert await last(world, training, left_s=left_s) == CHECKPOINTED
    assert [bundle.name for bundle in world.archive.bundles()] == ["bundle-1"]
    assert world.archive.choose().bundle is not None


@pytest.mark.parametrize("left_s", [None, 0.05], ids=["no deadline", "deadline"])
@pytest.mark.asyncio
async def test_a_step_that_does_not_end_in_time_is_said(
    left_s: float | None, tmp_path: Path
) -> None:
    """Also without a deadline: a worker that is halted does not end it."""
    world = await after_step_1(tmp_path)
    training = Training(world, in_long_step=True)
    end = await last(world, training, left_s=left_s, step_timeout_s=0.05)
    assert not end.saved
    assert "missing_trainer_anchor: the newest step has no checkpoint" in end.how
    assert world.archive.bundles() == []
    assert training.told.is_set()


@pytest.mark.asyncio
async def test_a_train_pump_that_fails_instead_of_ending_has_saved_nothing(tmp_path: Path) -> None:
    world = await after_step_1(tmp_path)
    told = asyncio.Event()

    async def fail() -> None:
        await told.wait()
        raise CheckpointFailed("the checkpoint failed", remedy="make room")

    training = asyncio.create_task(fail())
    with pytest.raises(CheckpointFailed, match="the checkpoint failed"):
        await save_last(
            world.snapshotter,
            training,
            stop_after_step=told.set,
            train_steps=lambda: world.cell.state.progress.train_steps,
            until_s=None,
            step_timeout_s=60.0,
        )


@pytest.mark.asyncio
async def test_a_checkpoint_on_its_way_at_the_deadline_is_waited_for(tmp_path: Path) -> None:
    world = await after_step_1(tmp_path)
    training = Training(world, in_long_step=True)
    began, go_on = asyncio.Event(), asyncio.Event()

    async def write(path: Path) -> None:
        began.set()
        await go_on.wait()

    async def checkpoint() -> None:
        await training.told.wait()
        assert (await world.snapshotter.save_trainer_checkpoint(write)).saved

    saving = asyncio.create_task(checkpoint())
    lasting = asyncio.create_task(last(world, training, left_s=0.5))
    await began.wait()
    await asyncio.sleep(0.6)
    assert not lasting.done()
    go_on.set()
    assert await lasting == SAVED
    await saving
    assert len(world.archive.bundles()) == 2


@pytest.mark.asyncio
async def test_an_optimizer_commit_is_waited_out(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0",)), OptimizerCommitOpened(step=1))
    world.archive.anchors = {0, 1}
    lasting = asyncio.create_task(last(world, Training(world, in_long_step=True), left_s=None))
    await asyncio.sleep(0.1)
    assert not lasting.done()
    await world.do(StepCommitted(step=1, trainer_version=1))
    assert await lasting == SAVED


@pytest.mark.asyncio
async def test_a_step_that_ends_while_the_save_is_written_is_saved_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    training = Training(world, in_long_step=True)

    before_and_after = iter((0, 1))
    lasting = asyncio.create_task(
        save_last(
            world.snapshotter,
            training.task,
            stop_after_step=training.told.set,
            train_steps=lambda: next(before_and_after),
            until_s=None,
            step_timeout_s=60.0,
        )
    )
    while not world.archive.bundles():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not lasting.done()
    training.may_end.set()
    assert await lasting == CHECKPOINTED
    assert len(world.archive.bundles()) == 2


@pytest.mark.asyncio
async def test_a_step_that_ends_too_late_to_be_saved_is_said(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    training = Training(world, in_long_step=True)
    before_and_after = iter((0, 1))
    end = await save_last(
        world.snapshotter,
        training.task,
        stop_after_step=training.told.set,
        train_steps=lambda: next(before_and_after),
        until_s=asyncio.get_running_loop().time(),
        step_timeout_s=60.0,
    )
    training.task.cancel()
    assert end == LastSaveEnd(
        saved=False, how="last snapshot: completed, before the end of another step"
    )
    assert len(world.archive.bundles()) == 1


@pytest.mark.asyncio
async def test_before_a_deadline_a_full_disk_is_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    world.archive.failing = {"begin": DISK_FULL}
    lasting = asyncio.create_task(last(world, Training(world, in_long_step=True), left_s=60.0))
    while world.archive.calls.count("begin") < 2:
        await asyncio.sleep(0.01)
    world.archive.failing = {}
    assert await lasting == SAVED


@pytest.mark.parametrize("left_s", [None, 0.1], ids=["no deadline", "deadline"])
@pytest.mark.asyncio
async def test_a_disk_that_stays_full_is_said(left_s: float | None, tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    world.archive.failing = {"begin": DISK_FULL}
    assert await last(world, Training(world, in_long_step=True), left_s=left_s) == LastSaveEnd(
        saved=False, how="last snapshot: io_error: [Errno 28] No space left on device"
    )


@pytest.mark.asyncio
async def test_a_state_that_contradicts_itself_ends_the_run_with_an_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    await world.plane.clear(PARTITION, ["e0p0/1"])
    with pytest.raises(RolloutSaveError, match="failed for good") as caught:
        await last(world, Training(world, in_long_step=True), left_s=60.0)
    assert caught.value.result.reason is Reason.INVARIANT_ERROR
    assert caught.value.__cause__ is world.snapshotter.last_error
