"""One save: its order, its reasons, what it holds, and what its failures leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from rollsync.pure.config import CheckpointingConfig
from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from rollsync.pure.rollout.checkpointing import RolloutTraceKind as Kind
from rollsync.pure.rollout.events import (
    FinalizationFailed,
    FinalizationStarted,
    GroupsClaimed,
    OptimizerCommitOpened,
)
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.data_plane import InProcessDataPlane, PinnedRows
from rollsync.shell.rollout.errors import DataPlaneError
from rollsync.shell.rollout.snapshots import RolloutSnapshotter
from tests.pure.rollout.events_kit import train
from tests.shell.rollout.cancelling import is_free
from tests.shell.rollout.world import PARTITION, PlainArchive, World, assert_same_rows, row_of


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
    assert after.metrics == [dict(restored.source.rollout_checkpoint_load_metrics or ())]
    assert after.metrics[0]["rollout_checkpoint/loaded_rows"] == len(owned)
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
    whole = world.archive.row_bytes
    await world.ready(40)
    await world.snapshotter.save_rollout_snapshot()
    assert world.archive.row_bytes - whole < whole / 10

    resumed = World(tmp_path)
    await resumed.restore()
    await resumed.ready(41)
    assert await resumed.buffer.clear_retired() == 2
    await resumed.snapshotter.save_rollout_snapshot()
    assert resumed.archive.row_bytes < whole / 10, "a resumed run shares what it has read"
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


class Retiring(PlainArchive):
    """Always has something to retire."""

    def prune(self) -> Sequence[str]:
        super().prune()
        return ("snapshots/000001", "segments/a")


@pytest.mark.asyncio
async def test_what_a_prune_removed_is_in_the_trace_and_a_failed_save_prunes_nothing(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, archive=Retiring(tmp_path))
    await world.ready(0)
    world.archive.failing = {"publish": OSError(28, "no space left")}
    await world.snapshotter.save_rollout_snapshot()
    assert "prune" not in world.archive.calls
    world.archive.failing = {}
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    pruned = [each.subject for each in world.trace.trace.events if each.kind is Kind.PRUNED]
    assert pruned == ["snapshots/000001", "segments/a"]


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


@pytest.mark.asyncio
async def test_the_order_of_a_save(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    world.archive.calls.clear()
    clock = asyncio.get_running_loop().time
    began_s = clock()
    await world.snapshotter.save_rollout_snapshot()
    assert 0 < world.snapshotter.longest_save_s <= clock() - began_s
    assert world.metrics[-1]["rollout_checkpoint/save_s"] == world.snapshotter.longest_save_s
    assert world.archive.calls == [
        "has_anchor",
        "begin",
        "put_segment",  # the rows
        "put_segment",  # the state
        "publish",
        "abandon",
        "prune",
    ]
    assert [event.kind for event in world.trace.trace.events] == [
        Kind.SAVE_STARTED,
        Kind.CUT_TAKEN,
        Kind.CUT_LEFT,
        Kind.PUBLISHED,
        Kind.SAVE_ENDED,
    ]


@pytest.mark.asyncio
async def test_what_else_is_told_of_the_state_is_durable_before_the_save_has_its_name(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    calls = world.archive.calls
    disk_is_full = [True]

    def make_durable() -> None:
        calls.append("make durable")
        assert Kind.CUT_LEFT in [event.kind for event in world.trace.trace.events]
        if disk_is_full[0]:
            raise OSError(28, "no space left")

    snapshotter = RolloutSnapshotter(
        world.parts, archive=world.archive, before_publication=make_durable
    )
    result = await snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (False, Reason.IO_ERROR)
    assert "publish" not in calls
    calls.clear()
    disk_is_full[0] = False
    assert (await snapshotter.save_rollout_snapshot()).saved
    assert calls.index("make durable") < calls.index("publish")


TIMEOUT_S = 0.5
"""So long that also a busy machine gets to the call that waits before it is over."""


class Slow(PlainArchive):
    """Its call `at` waits until it is let go on, in its thread."""

    def __init__(self, root: Path, at: str) -> None:
        super().__init__(root)
        self._at = at
        self.reached = threading.Event()
        self.may_go_on = threading.Event()

    def _called(self, name: str) -> None:
        super()._called(name)
        if name == self._at:
            self.reached.set()
            assert self.may_go_on.wait(30)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 30)


@pytest.mark.asyncio
async def test_what_happens_after_the_cut_is_not_in_the_snapshot(tmp_path: Path) -> None:
    """Rows that are cleared and written while the save runs are saved as they were."""
    archive = Slow(tmp_path, "put_segment")
    world = World(tmp_path, archive=archive)
    await world.ready(0, 1)
    saving = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
    await archive.until_reached()
    await world.do(*train(world.state, "e0p0"))
    await world.buffer.clear_retired()
    await world.buffer.write_back({"e0p1/0": {"logprobs": torch.zeros(5)}})
    await world.ready(2)
    archive.may_go_on.set()
    assert (await saving).saved
    assert world.state.progress.train_steps == 1

    after = World(tmp_path)
    await after.restore()
    keys = ("e0p0/0", "e0p0/1", "e0p1/0", "e0p1/1")
    assert_same_rows(await after.rows(), {key: row_of(key) for key in keys})
    assert after.state.progress.train_steps == 0


@pytest.mark.asyncio
async def test_a_row_written_after_the_last_save_is_saved_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    await world.snapshotter.save_rollout_snapshot()
    await world.buffer.write_back({"e0p0/0": {"advantages": torch.ones(5)}})
    await world.snapshotter.save_rollout_snapshot()
    after = World(tmp_path)
    await after.restore()
    rows = await after.rows()
    assert torch.equal(rows["e0p0/0"]["advantages"], torch.ones(5))
    assert "advantages" not in rows["e0p0/1"]


@pytest.mark.asyncio
async def test_one_save_at_a_time(tmp_path: Path) -> None:
    archive = Slow(tmp_path, "publish")
    world = World(tmp_path, archive=archive)
    await world.ready(0)

    async def write(directory: Path) -> None:
        (directory / "weights").write_bytes(b"w")

    first = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
    await archive.until_reached()
    second = asyncio.create_task(world.snapshotter.save_trainer_checkpoint(write))
    await asyncio.wait({second}, timeout=0.05)
    assert archive.calls.count("begin") == 1
    archive.may_go_on.set()
    assert (await first).saved
    assert (await second).saved


@pytest.mark.asyncio
async def test_claims_are_rolled_back_in_a_snapshot_and_an_error_in_a_checkpoint(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0",)))
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    wrote: list[Path] = []

    async def write(directory: Path) -> None:
        wrote.append(directory)

    result = await world.snapshotter.save_trainer_checkpoint(write)
    assert (result.saved, result.reason) == (False, Reason.INVARIANT_ERROR)
    assert "holds 1 claims" in str(world.snapshotter.last_error)
    assert wrote == [], "the trainer is not asked to write for a save that is refused"
    after = World(tmp_path)
    await after.restore()
    assert after.state.open_step is None
    assert set(after.state.replay) == {"e0p0", "e0p1"}


@pytest.mark.asyncio
async def test_no_save_while_the_optimizer_commits(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0",)), OptimizerCommitOpened(step=1))
    result = await world.snapshotter.save_rollout_snapshot(force=True)
    assert (result.saved, result.reason) == (False, Reason.OPTIMIZER_COMMIT_IN_PROGRESS)
    assert world.archive.calls == []


@pytest.mark.asyncio
@pytest.mark.parametrize("commit", [True, False])
async def test_the_trainer_is_looked_at_again_inside_the_cut(tmp_path: Path, commit: bool) -> None:
    archive = Slow(tmp_path, "begin")
    world = World(tmp_path, archive=archive)
    await world.ready(0)
    saving = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
    await archive.until_reached()
    events = train(world.state, "e0p0")
    await world.do(*(events if commit else events[:2]))
    archive.may_go_on.set()
    result = await saving
    assert (result.saved, result.reason) == (False, Reason.TRAINER_STATE_CHANGED)
    assert archive.bundles() == []


@pytest.mark.asyncio
async def test_a_trainer_checkpoint_is_one_directory_and_becomes_the_anchor(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    await world.do(*train(world.state, "e0p0"))
    assert (await world.snapshotter.save_rollout_snapshot()).reason is Reason.MISSING_TRAINER_ANCHOR

    async def write(directory: Path) -> None:
        (directory / "weights.safetensors").write_bytes(b"weights of step 1")

    assert (await world.snapshotter.save_trainer_checkpoint(write)).saved
    (bundle,) = world.archive.bundles()
    assert (bundle / "weights.safetensors").read_bytes() == b"weights of step 1"
    await world.ready(2)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    after = World(tmp_path)
    restored = await after.restore()
    assert restored is not None
    assert after.state.progress.train_steps == 1
    assert set(after.state.replay) == {"e0p1", "e0p2"}


class _Remembering(InProcessDataPlane):
    """Remembers its pins."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: list[PinnedRows] = []

    def pin(self, partition_id: str) -> PinnedRows:
        self.pins.append(super().pin(partition_id))
        return self.pins[-1]


@pytest.mark.asyncio
async def test_rows_are_held_until_they_are_in_segments_and_not_for_the_trainers_files(
    tmp_path: Path,
) -> None:
    """A queue that has no copies lets nobody clear a pinned row, so the run waits for the save."""
    plane = _Remembering()
    world = World(tmp_path, plane=plane)
    await world.ready(0)

    async def write(directory: Path) -> None:
        (pinned,) = plane.pins
        with pytest.raises(DataPlaneError, match="the pin is released"):
            await pinned.get(["e0p0/0"])
        await world.plane.clear(PARTITION, ["e0p0/0"])

    assert (await world.snapshotter.save_trainer_checkpoint(write)).saved
    after = World(tmp_path)
    await after.restore()
    assert_same_rows(await after.rows(), {key: row_of(key) for key in ("e0p0/0", "e0p0/1")})


@pytest.mark.asyncio
async def test_a_trainer_that_cannot_write_fails_the_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)

    async def write(directory: Path) -> None:
        (directory / "half").write_bytes(b"")
        raise OSError(28, "no space left")

    result = await world.snapshotter.save_trainer_checkpoint(write)
    assert (result.saved, result.reason) == (False, Reason.IO_ERROR)
    assert world.archive.bundles() == []
    assert not (tmp_path / "draft").exists()


@pytest.mark.asyncio
async def test_a_trainer_that_stepped_while_it_wrote_fails_the_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)

    async def write_and_step(directory: Path) -> None:
        await world.do(*train(world.state, "e0p0"))

    result = await world.snapshotter.save_trainer_checkpoint(write_and_step)
    assert (result.saved, result.reason) == (False, Reason.TRAINER_STATE_CHANGED)
    assert world.archive.bundles() == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError("slow disk"), Reason.TIMEOUT),
        (OSError(5, "EIO"), Reason.IO_ERROR),
        (DataPlaneError("row gone"), Reason.IO_ERROR),
        (ZeroDivisionError("a bug"), Reason.INVARIANT_ERROR),
    ],
)
async def test_the_reason_of_a_failure(tmp_path: Path, error: Exception, reason: Reason) -> None:
    world = World(tmp_path)
    await world.ready(0)
    world.archive.failing = {"publish": error}
    result = await world.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (False, reason)
    assert repr(world.snapshotter.last_error) == repr(error)
    assert world.metrics[-1][f"rollout_checkpoint/reason/{reason}"] == 1.0


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["begin", "put_segment"])
async def test_an_attempt_that_takes_too_long_times_out_and_leaves_nothing(
    tmp_path: Path, call: str
) -> None:
    archive = Slow(tmp_path, call)
    checkpointing = CheckpointingConfig(save_timeout_s=TIMEOUT_S)
    world = World(tmp_path, archive=archive, checkpointing=checkpointing)
    await world.ready(0)
    saving = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
    await archive.until_reached()
    await asyncio.sleep(1.2 * TIMEOUT_S)
    assert not saving.done(), "the thread is waited for: it must not write behind our back"
    archive.may_go_on.set()
    result = await saving
    assert (result.saved, result.reason) == (False, Reason.TIMEOUT)
    assert archive.bundles() == []
    assert not (tmp_path / "draft").exists()
    assert await is_free(world.barrier)


@pytest.mark.asyncio
async def test_time_that_runs_out_while_publishing_is_a_save(tmp_path: Path) -> None:
    """After the bundle has its name it is there, and saying otherwise would be wrong."""
    archive = Slow(tmp_path, "publish")
    checkpointing = CheckpointingConfig(save_timeout_s=TIMEOUT_S)
    world = World(tmp_path, archive=archive, checkpointing=checkpointing)
    await world.ready(0)
    saving = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
    await archive.until_reached()
    await asyncio.sleep(1.2 * TIMEOUT_S)
    archive.may_go_on.set()
    result = await saving
    assert (result.saved, result.reason) == (True, Reason.COMPLETED)
    skipped = await world.snapshotter.save_rollout_snapshot()
    assert skipped.reason is Reason.NO_DATA_PLANE_MUTATIONS


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["has_anchor", "begin", "put_segment", "publish", "prune"])
async def test_a_save_cancelled_anywhere_leaves_the_run_able_to_save(
    tmp_path: Path, call: str
) -> None:
    archive = Slow(tmp_path, call)
    world = World(tmp_path, archive=archive)
    await world.ready(0)
    saving = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
    await archive.until_reached()
    saving.cancel()
    await asyncio.sleep(0)
    archive.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert await is_free(world.barrier)
    assert not (tmp_path / "draft").exists()
    published = len(archive.bundles())
    assert published == (1 if call in ("publish", "prune") else 0)
    assert (await world.snapshotter.save_rollout_snapshot(force=True)).saved
    assert len(archive.bundles()) == published + 1


@pytest.mark.asyncio
async def test_a_save_cancelled_while_it_waits_for_the_cut(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    async with world.barrier.mutation(CheckpointMutationKind.OTHER):
        saving = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
        await asyncio.wait({saving}, timeout=0.1)
        assert not saving.done()
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
    assert await is_free(world.barrier)
    assert (await world.snapshotter.save_rollout_snapshot()).saved


@pytest.mark.asyncio
async def test_a_row_that_is_gone_is_an_invariant_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0)
    await world.plane.clear(PARTITION, ["e0p0/1"])
    result = await world.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (False, Reason.INVARIANT_ERROR)
    assert "e0p0/1" in str(world.snapshotter.last_error)


@pytest.mark.asyncio
async def test_an_unsettled_finalization_is_not_saved(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.admit(0)
    for sibling in range(2):
        await world.seal("e0p0", sibling)
    await world.do(FinalizationStarted(group_id="e0p0"))
    result = await world.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (False, Reason.IO_ERROR)
    await world.do(FinalizationFailed(group_id="e0p0", outcome_known=True))
    assert (await world.snapshotter.save_rollout_snapshot()).saved
