"""The train pump: the order of a step, its checkpoints, and what their failures come to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from rollsync.pure.rollout.events import (
    GroupDropped,
    GroupsClaimed,
    OptimizerCommitOpened,
    RolloutEvent,
    StepCommitted,
)
from rollsync.pure.rollout.sampler import InOrderSampler, ReadyFirstSampler
from rollsync.pure.rollout.state import (
    Dropped,
    DropReason,
    RolloutState,
    Trained,
    TrainingProgress,
)
from rollsync.shell.journal import StepClaimed, StepTrained, WeightsSynced
from rollsync.shell.rollout.clients import EnginesLost, TrainerLost
from rollsync.shell.rollout.train_pump import CheckpointFailed, TrainingEnd, training_rows
from tests.pure.rollout.events_kit import admitted, drop, made_ready, train
from tests.shell.rollout.pumps import SOON_S, Pumps
from tests.shell.rollout.world import PARTITION, World

STEP = ["compute", "apply", "sync", "save"]
STEP_EVENTS = ["GroupsClaimed", "OptimizerCommitOpened", "StepCommitted"]


def record_step(pumps: Pumps) -> None:
    """Note a step's events among the trainer's calls."""

    def saw(event: RolloutEvent, _: RolloutState) -> None:
        if type(event).__name__ in STEP_EVENTS:
            pumps.trainer.calls.append(type(event).__name__)

    pumps.world.cell.listen(saw)


def pumps_over(tmp_path: Path, *, max_steps: int = 2, every: int = 1) -> Pumps:
    return Pumps(World(tmp_path), tmp_path, max_steps=max_steps, every=every)


@pytest.mark.asyncio
async def test_each_step_is_computed_applied_synced_and_saved_in_this_order(tmp_path: Path) -> None:
    pumps, clock = pumps_over(tmp_path), asyncio.get_running_loop().time
    began_s = clock()
    async with pumps.rolling():
        end = await pumps.training.run()
    took_s = clock() - began_s
    assert end == TrainingEnd(why="all steps are trained", completed=True)
    assert pumps.trainer.calls == STEP * 2
    assert pumps.world.state.progress.train_steps == 2
    kinds = [
        type(each)
        for each in pumps.entries
        if isinstance(each, StepClaimed | StepTrained | WeightsSynced)
    ]
    assert kinds == [StepClaimed, StepTrained, WeightsSynced] * 2
    assert 0 < pumps.training.longest_step_s <= took_s
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


@pytest.mark.asyncio
async def test_a_step_changes_weights_only_inside_its_commit_window(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path, max_steps=1)
    record_step(pumps)
    async with pumps.rolling():
        await pumps.training.run()
    before, window, after = STEP_EVENTS
    assert pumps.trainer.calls == [before, "compute", window, "apply", after, "sync", "save"]


@pytest.mark.asyncio
async def test_the_journal_says_what_a_step_trained_and_what_the_engines_serve(
    tmp_path: Path,
) -> None:
    pumps = pumps_over(tmp_path)
    async with pumps.rolling():
        await pumps.training.run()
    assert pumps.rollouts.served_weight_version == 2
    claims = [each for each in pumps.entries if isinstance(each, StepClaimed)]
    trained = [each for each in pumps.entries if isinstance(each, StepTrained)]
    for number, claim, entry in zip((1, 2), claims, trained, strict=True):
        ids = tuple(
            prompt_id
            for prompt_id, outcome in pumps.world.state.outcomes.items()
            if outcome == Trained(step=number)
        )
        assert claim.step == number
        assert sorted(claim.prompt_ids) == sorted(ids)
        assert len(ids) == pumps.world.num_prompts_per_step
        assert entry == StepTrained(
            step=number,
            prompt_ids=claim.prompt_ids,
            mean_reward=1.0,
            loss=0.5,
            weight_versions=entry.weight_versions,
        )
        assert len(entry.weight_versions) == len(ids)
    assert [each for each in pumps.entries if isinstance(each, WeightsSynced)] == [
        WeightsSynced(weight_version=version, bytes=1, seconds=0.0) for version in (1, 2)
    ]


def test_the_trainer_gets_each_row_with_its_own_reward_and_mask() -> None:
    group = replace(
        made_ready(admitted(0), "e0p0").replay["e0p0"], rewards=(0.25, 0.75), masked=(True, False)
    )
    rows = [
        {
            "token_ids": torch.tensor([1, 2, token]),
            "prompt_length": torch.tensor(2),
            "behaviour_log_probabilities": torch.tensor([-float(token)]),
        }
        for token in (3, 4)
    ]
    trained = training_rows(group, rows)
    assert [row.token_ids.tolist() for row in trained] == [[1, 2, 3], [1, 2, 4]]
    assert [row.behaviour_log_probabilities.tolist() for row in trained] == [[-3.0], [-4.0]]
    assert [(row.prompt_length, row.reward, row.masked) for row in trained] == [
        (2, 0.25, True),
        (2, 0.75, False),
    ]
    with pytest.raises(ValueError, match="longer"):
        training_rows(group, rows[:1])


@pytest.mark.asyncio
async def test_checkpoints_are_made_every_so_many_steps_and_after_the_last(tmp_path: Path) -> None:
    pumps = Pumps(World(tmp_path, sampler=InOrderSampler()), tmp_path, max_steps=3, every=2)
    async with pumps.rolling():
        await pumps.training.run()
    assert pumps.trainer.calls == [*STEP[:3], *STEP, *STEP]


@pytest.mark.asyncio
async def test_what_waits_for_the_weights_is_told_of_their_sync(tmp_path: Path) -> None:
    """As the rollout pump does before it admits another batch; nothing else happens meanwhile."""
    pumps = pumps_over(tmp_path)
    seen = pumps.changes.version
    await pumps.training.sync_weights()
    assert pumps.changes.version > seen


@pytest.mark.asyncio
async def test_what_has_grown_too_old_is_dropped_and_not_trained(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path, max_steps=9)
    world = pumps.world
    for first in (0, 2, 4):
        await world.ready(first, first + 1)
    await world.do(*train(world.state, "e0p0", "e0p1"))
    await world.do(*train(world.state, "e0p2", "e0p3"))
    pumps.rollouts.served_weight_version = 2
    training = asyncio.create_task(pumps.training.run())
    async with asyncio.timeout(SOON_S):
        await pumps.until(GroupDropped, 2)
        pumps.training.stop_after_step()
        await training
    stale = Dropped(step=3, reason=DropReason.STALE)
    assert world.state.outcomes["e0p4"] == world.state.outcomes["e0p5"] == stale
    assert await world.plane.list_rows(PARTITION) == {}
    assert list(world.state.rows_to_clear) == []


@pytest.mark.asyncio
async def test_a_batch_that_lost_every_group_is_a_step_without_training(tmp_path: Path) -> None:
    world = World(tmp_path, sampler=ReadyFirstSampler())
    pumps = Pumps(world, tmp_path, max_steps=1)
    await world.admit(0, 1)
    await world.do(drop("e0p0", 0), drop("e0p1", 0))
    record_step(pumps)
    async with asyncio.timeout(SOON_S):
        assert (await pumps.training.run()).completed
    before, window, after = STEP_EVENTS
    assert pumps.trainer.calls == [before, window, "skip", after, "sync", "save"]
    assert world.state.progress == TrainingProgress(train_steps=1, trainer_version=1)
    assert [each for each in pumps.entries if isinstance(each, StepTrained)] == [
        StepTrained(step=1, prompt_ids=(), mean_reward=None, loss=None, weight_versions=())
    ]


@pytest.mark.parametrize("every", [1, 9])
@pytest.mark.asyncio
async def test_when_the_prompts_are_used_up_what_has_no_checkpoint_gets_one(
    tmp_path: Path, every: int
) -> None:
    pumps = Pumps(World(tmp_path), tmp_path, max_steps=9, every=every, prompts=2)
    async with pumps.rolling():
        end = await pumps.training.run()
    assert end == TrainingEnd(why="the prompts are used up", completed=True)
    assert pumps.trainer.calls == STEP
    assert len(pumps.world.archive.bundles()) == 1


@pytest.mark.parametrize("saved_already", [False, True])
@pytest.mark.asyncio
async def test_prompts_that_were_only_dropped_are_saved_at_the_end(
    tmp_path: Path, saved_already: bool
) -> None:
    """Also where a periodic snapshot has just saved them: the end does not fail for that."""
    pumps = Pumps(World(tmp_path), tmp_path, max_steps=9, prompts=2)
    world = pumps.world
    await world.admit(0, 1)
    pumps.fleet.due = True

    async def lose_every_prompt() -> None:
        await world.do(drop("e0p0", None), drop("e0p1", None))
        if saved_already:
            assert (await world.snapshotter.save_rollout_snapshot()).saved

    pumps.in_sync = lose_every_prompt
    async with asyncio.timeout(SOON_S):
        end = await pumps.training.run()
    assert end == TrainingEnd(why="the prompts are used up", completed=True)
    assert pumps.trainer.calls == ["sync"]
    restored = World(tmp_path, archive=world.archive)
    assert await restored.restore() is not None
    assert restored.state.outcomes == world.state.outcomes


@pytest.mark.asyncio
async def test_an_engine_that_waits_for_weights_gets_them_before_the_next_batch(
    tmp_path: Path,
) -> None:
    pumps = pumps_over(tmp_path, max_steps=1)
    pumps.fleet.due = True
    async with pumps.rolling():
        await pumps.training.run()
    assert pumps.trainer.calls == ["sync", *STEP]


@pytest.mark.asyncio
async def test_an_engine_that_comes_while_the_pump_waits_gets_its_weights(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path)
    training = asyncio.create_task(pumps.training.run())
    async with asyncio.timeout(SOON_S):
        await asyncio.sleep(0.01)
        pumps.fleet.due = True
        pumps.fleet.change()
        while pumps.trainer.calls != ["sync"]:
            await asyncio.sleep(0.001)
        pumps.training.stop_after_step()
        assert not (await training).completed


@pytest.mark.asyncio
async def test_lost_engines_end_the_run_with_its_steps_saved(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path, max_steps=9, every=9)

    async def lose_engines() -> None:
        raise EnginesLost("no engine is left")

    pumps.in_sync = lose_engines
    async with pumps.rolling():
        with pytest.raises(EnginesLost, match="no engine is left"):
            await pumps.training.run()
    assert pumps.trainer.calls == STEP
    assert len(pumps.world.archive.bundles()) == 1


@pytest.mark.asyncio
async def test_a_policy_worker_lost_in_a_save_is_no_failure_of_the_disk(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path)
    pumps.trainer.unwritable = TrainerLost("a policy worker died")
    async with pumps.rolling():
        with pytest.raises(TrainerLost, match="a policy worker died"):
            await pumps.training.run()


@pytest.mark.asyncio
async def test_told_to_stop_while_it_waits_it_stops(tmp_path: Path) -> None:
    pumps = pumps_over(tmp_path)
    training = asyncio.create_task(pumps.training.run())
    await asyncio.sleep(0.01)
    assert not training.done()
    pumps.training.stop_after_step()
    async with asyncio.timeout(SOON_S):
        assert await training == TrainingEnd(why="told to stop", completed=False)


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.asyncio
async def test_told_to_stop_at_the_step_it_began_with_it_saves_only_a_missing_checkpoint(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    """A resume goes on from a snapshot although the checkpoint of its step is damaged."""
    pumps = pumps_over(tmp_path, max_steps=9, every=9)
    world = pumps.world
    await world.ready(0, 1)
    await world.do(*train(world.state, "e0p0", "e0p1"))
    world.archive.anchors = {0, 1} if has_checkpoint else {0}
    pumps.training.stop_after_step()
    await pumps.training.run()
    assert pumps.trainer.calls == ([] if has_checkpoint else ["save"])
