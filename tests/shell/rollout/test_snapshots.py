"""One save: its order, its reasons, what it holds, and what its failures leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from tests.shell.rollout.world import World, assert_same_rows, row_of


@pytest.mark.asyncio
async def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    before = World(tmp_path)
    await before.ready(0, 1)
    await before.admit(2, 3)
    await before.seal("e0p2", 0)
    result = await before.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (True, Reason.COMPLETED)

    after = World(tmp_path)
    restored = await after.restore()
    assert restored is not None
    owned = {"e0p0/0", "e0p0/1", "e0p1/0", "e0p1/1", "e0p2/0/attempt-0"}
    assert_same_rows(await after.rows(), {key: row_of(key) for key in owned})
    assert after.state.replay == before.state.replay
    assert after.state.dataloader_state == before.state.dataloader_state
    assert [(each.group_id, each.sibling_index) for each in restored.plan.dispatches] == [
        ("e0p2", 1),
        ("e0p3", 0),
        ("e0p3", 1),
    ]
    assert set(restored.prompts) == {"e0p2", "e0p3"}
    assert restored.source.from_rollout_snapshot
    assert restored.trainer_path is None


@pytest.mark.asyncio
async def test_a_run_without_bundles_is_fresh(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert await world.restore() is None


@pytest.mark.asyncio
async def test_nothing_changed_is_skipped_and_force_saves_all_the_same(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    calls = list(world.archive.calls)
    again = await world.snapshotter.save_rollout_snapshot()
    assert (again.saved, again.reason) == (False, Reason.NO_DATA_PLANE_MUTATIONS)
    assert world.archive.calls == calls, "a save while nothing changed costs nothing"
    assert (await world.snapshotter.save_rollout_snapshot(force=True)).saved


@pytest.mark.asyncio
async def test_rows_are_written_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(*range(40))
    await world.snapshotter.save_rollout_snapshot()
    whole = world.archive.segment_bytes
    await world.ready(40)
    await world.snapshotter.save_rollout_snapshot()
    assert world.archive.segment_bytes - whole < whole / 10

    resumed = World(tmp_path)
    await resumed.restore()
    await resumed.ready(41)
    assert await resumed.buffer.clear_retired() == 2
    await resumed.snapshotter.save_rollout_snapshot()
    assert resumed.archive.segment_bytes < whole / 10, "a resumed run shares what it has read"
    last = World(tmp_path)
    await last.restore()
    assert_same_rows(await last.rows(), await resumed.rows())


@pytest.mark.asyncio
async def test_a_save_that_failed_leaves_nothing_that_makes_the_next_skip(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    for call in ("has_anchor", "begin", "put_segment", "publish"):
        world.archive.failing = {call: OSError(28, "no space left")}
        failed = await world.snapshotter.save_rollout_snapshot()
        assert (failed.saved, failed.reason) == (False, Reason.IO_ERROR), call
        assert not (tmp_path / "draft").exists()
    world.archive.failing = {}
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    after = World(tmp_path)
    await after.restore()
    assert_same_rows(
        await after.rows(), {key: row_of(key) for key in ("e0p0/0", "e0p0/1", "e0p1/0", "e0p1/1")}
    )


@pytest.mark.asyncio
async def test_a_prune_that_fails_does_not_fail_the_save(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    world.archive.failing = {"prune": OSError(16, "busy")}
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    assert any("busy" in line for line in world.trace.trace.lines())


@pytest.mark.asyncio
async def test_a_step_without_its_trainer_checkpoint_has_no_snapshots(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.archive.anchors = set()
    await world.ready(0)
    result = await world.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (False, Reason.MISSING_TRAINER_ANCHOR)


@pytest.mark.asyncio
async def test_counters_that_differ_from_the_trainers_are_not_saved(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    world.trainer_progress = replace(world.state.progress, train_steps=1)
    result = await world.snapshotter.save_rollout_snapshot()
    assert result.reason is Reason.TRAINER_STATE_CHANGED
    world.trainer_progress = None
    assert (await world.snapshotter.save_rollout_snapshot()).saved
