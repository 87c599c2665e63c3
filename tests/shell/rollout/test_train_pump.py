"""The train pump: the order of a step, its checkpoints, and what their failures come to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollsync.pure.rollout.events import GroupsClaimed, OptimizerCommitOpened, StepCommitted
from rollsync.shell.journal import StepClaimed, StepTrained, WeightsSynced
from rollsync.shell.rollout.train_pump import CheckpointFailed, TrainingEnd
from tests.shell.rollout.pumps import Pumps
from tests.shell.rollout.world import PARTITION, World

STEP = ["compute", "apply", "sync", "save"]


def pumps_over(tmp_path: Path, *, max_steps: int = 2, every: int = 1) -> Pumps:
    return Pumps(World(tmp_path), tmp_path, max_steps=max_steps, every=every)


@pytest.mark.asyncio
async def test_each_step_is_computed_applied_synced_and_saved_in_this_order(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path)
    async with pumps.rolling():
        end = await pumps.training.run()
    assert end == TrainingEnd(why="all steps are trained", completed=True)
    assert pumps.trainer.calls == STEP * 2
    assert pumps.world.state.progress.train_steps == 2
    kinds = [
        type(each)
        for each in pumps.entries
        if isinstance(each, StepClaimed | StepTrained | WeightsSynced)
    ]
    assert kinds == [StepClaimed, StepTrained, WeightsSynced] * 2
    assert pumps.training.longest_step_s > 0
    left = await pumps.world.plane.list_rows(PARTITION)
    assert not {key.split("/")[0] for key in left} & set(pumps.world.state.outcomes)


@pytest.mark.asyncio
async def test_a_snapshot_can_be_taken_while_gradients_are_computed(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path, max_steps=1)
    pumps.trainer.may_compute.clear()
    async with pumps.rolling():
        training = asyncio.create_task(pumps.training.run())
        await pumps.until(GroupsClaimed)
        assert (await pumps.world.snapshotter.save_rollout_snapshot()).saved
        assert pumps.seen(OptimizerCommitOpened) == 0
        pumps.trainer.may_compute.set()
        await training
    assert pumps.seen(StepCommitted) == 1


@pytest.mark.asyncio
async def test_a_checkpoint_that_fails_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path)
    pumps.trainer.unwritable = OSError(28, "No space left on device")
    async with pumps.rolling():
        with pytest.raises(CheckpointFailed, match=r"io_error.*No space left") as caught:
            await pumps.training.run()
    assert caught.value.__cause__ is pumps.trainer.unwritable
    assert pumps.world.archive.bundles() == []


@pytest.mark.asyncio
async def test_told_to_stop_it_ends_its_step_and_saves_what_has_no_checkpoint(
    tmp_path: Path,
) -> None:
    pumps = pumps_over(tmp_path, max_steps=9, every=9)
    pumps.trainer.may_compute.clear()
    async with pumps.rolling():
        training = asyncio.create_task(pumps.training.run())
        await pumps.until(GroupsClaimed)
        pumps.training.stop_after_step()
        pumps.trainer.may_compute.set()
        assert await training == TrainingEnd(why="told to stop", completed=False)
    assert pumps.trainer.calls == STEP
    assert [bundle.name for bundle in pumps.world.archive.bundles()] == ["bundle-1"]


@pytest.mark.asyncio
async def test_told_to_stop_before_the_first_step_it_saves_nothing(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path)
    pumps.training.stop_after_step()
    assert (await pumps.training.run()).completed is False
    assert pumps.trainer.calls == []
