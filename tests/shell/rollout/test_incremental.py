"""Saves that add to the save before: what they write, and that it is the whole state again.

Every snapshot of a run is resumed from, in a fresh process, and compared with the state that was
saved; also those whose chain begins in a bundle that is long gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from returns.pipeline import is_successful

from rollsync.codecs import decode
from rollsync.pure.config import CheckpointingConfig, RetentionConfig
from rollsync.pure.rollout.capture import capture
from rollsync.pure.rollout.checkpointing import CheckpointKind, TQReplayMetadataState
from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from rollsync.pure.rollout.events import GroupsClaimed, ReserveDrawn
from rollsync.pure.rollout.inventory import owned_rows
from rollsync.pure.rollout.state import RecoveryGranularity, RolloutState
from rollsync.pure.snapshot.chain import MAX_DIFFERENCES
from rollsync.shell.cli import main
from rollsync.shell.files import read_state
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.captured import REPLAY_METADATA_FILE
from rollsync.shell.rollout.data_plane import InProcessDataPlane, PinnedRows
from rollsync.shell.store.checkup import examine
from rollsync.shell.store.filesystem import RealFileSystem
from tests.pure.rollout.events_kit import drop, reserve, spare, train
from tests.shell.rollout.world import PARTITION, PlainBundle, World, assert_same_rows, row_of


def world_at(root: Path, *, keep: int = 100) -> World:
    retention = RetentionConfig(trainer_checkpoints=keep, snapshots_per_checkpoint=keep)
    return World(
        root,
        store_on=RealFileSystem(),
        checkpointing=CheckpointingConfig(retention=retention),
    )


async def write_weights(path: Path) -> None:
    (path / "weights.bin").write_bytes(b"weights")


async def save(world: World) -> RolloutState:
    """Save a snapshot; what it has to hold."""
    assert (await world.snapshotter.save_rollout_snapshot(force=True)).saved
    return kept(world.state)


def kept(state: RolloutState) -> RolloutState:
    captured = capture(state, CheckpointKind.ROLLOUT_SNAPSHOT)
    assert is_successful(captured)
    return captured.unwrap().state


def newest(world: World) -> PlainBundle:
    return PlainBundle(world.archive.bundles()[-1])


def sizes(bundle: PlainBundle) -> list[int]:
    return [
        (bundle.path.parent / "segments" / name).stat().st_size
        for name in bundle.facts.state_segments
    ]


async def live(world: World) -> list[RolloutState]:
    """A run in which all sorts of things happen, saved after each; what each save has to hold."""
    states = []
    await world.ready(*range(10))
    await world.admit(*range(10, 30))
    states.append(await save(world))
    await world.seal("e0p10", 0)
    states.append(await save(world))
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0", "e0p1")))
    states.append(await save(world))
    await world.buffer.write_back({"e0p0/0": {"advantages": row_of("a")["logprobs"]}})
    states.append(await save(world))
    await world.do(*train(world.state, "e0p0", "e0p1")[1:])
    assert (await world.snapshotter.save_trainer_checkpoint(write_weights)).saved
    states.append(kept(world.state))
    await world.do(spare(30, 31), drop("e0p11", 0), drop("e0p2", 0))
    states.append(await save(world))
    await world.buffer.clear_retired()
    await world.finish("e0p10")
    states.append(await save(world))
    states.append(await save(world))
    await world.do(reserve(32))
    states.append(await save(world))
    await world.do(spare(33, 34))
    states.append(await save(world))
    # The save before has these spares; no event names the groups that they become.
    await world.do(drop("e0p12", 0))
    states.append(await save(world))
    await world.do(
        ReserveDrawn(count=1, granularity=RecoveryGranularity.SIBLING, expected_generations=2)
    )
    states.append(await save(world))
    return states


def bundles(root: Path) -> list[Path]:
    """Of `live`, in the order in which they were made."""
    first = sorted((root / "bootstrap" / "snapshots").iterdir())
    return [*first, root / "step_000001", *sorted((root / "step_000001" / "snapshots").iterdir())]


@pytest.mark.asyncio
async def test_each_save_holds_the_state_of_its_moment_and_its_rows(tmp_path: Path) -> None:
    world = world_at(tmp_path)
    states = await live(world)
    rows = await world.rows()
    world.die()
    saved = bundles(tmp_path)
    assert [read_state(path) for path in saved] == states
    for path, state in reversed(list(zip(saved, states, strict=True))):
        after = world_at(tmp_path)
        restored = await after.restore()
        after.die()
        assert restored is not None
        assert restored.source.path == str(path)
        assert after.state.replay == state.replay
        owned = {key for group in state.replay.values() for key in group.sample_ids}
        assert set(await after.rows()) >= owned
        if path == saved[-1]:
            # (What is not in the plane of `world` any more was cleared since.)
            assert_same_rows(await after.rows(), {key: rows[key] for key in await after.rows()})
        shutil.rmtree(path)


@pytest.mark.asyncio
async def test_a_row_that_was_written_without_an_event_is_saved_as_it_is_now(
    tmp_path: Path,
) -> None:
    world = world_at(tmp_path)
    await world.ready(0, 1)
    await world.admit(2)
    await save(world)
    await world.buffer.write_back({"e0p1/0": {"advantages": row_of("a")["logprobs"]}})
    await save(world)
    await world.seal("e0p2", 0)
    await save(world)
    world.die()
    after = world_at(tmp_path)
    await after.restore()
    saved, rows = await after.rows(), await world.rows()
    assert {"e0p0/0", "e0p1/0", "e0p1/1", "e0p2/0/attempt-0"} <= set(saved)
    assert_same_rows(saved, {key: rows[key] for key in saved})


@pytest.mark.asyncio
async def test_what_a_save_writes_grows_with_what_changed(tmp_path: Path) -> None:
    written: dict[int, list[int]] = {}
    for groups in (200, 2000):
        world = World(tmp_path / str(groups))
        world.samples.contents = {f"s{index}": f"c{index}" for index in range(groups + 10)}
        await world.admit(*range(groups))
        await world.snapshotter.save_rollout_snapshot()
        await world.seal("e0p7", 0)
        await world.admit(groups, groups + 1)
        await world.finish("e0p8")
        await world.snapshotter.save_rollout_snapshot()
        bundle = newest(world)
        files = [path.stat().st_size for path in bundle.path.iterdir()]
        written[groups] = [sizes(bundle)[-1], *files]
        assert len(sizes(bundle)) == 2
        replay = decode(bundle.read(REPLAY_METADATA_FILE), TQReplayMetadataState).unwrap()
        assert [group.group_id for group in replay.groups] == ["e0p8"]
    for small, large in zip(written[200], written[2000], strict=True):
        assert large <= small + 100, written


class Asked(InProcessDataPlane):
    """Counts the rows that a save looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def pin(self, partition_id: str) -> PinnedRows:
        pinned = super().pin(partition_id)
        revisions = pinned.revisions

        def counted(keys: Iterable[str]) -> dict[str, int]:
            asked = tuple(keys)
            self.rows += len(asked)
            return revisions(asked)

        pinned.revisions = counted  # type: ignore[method-assign]
        return pinned


@pytest.mark.asyncio
async def test_what_a_save_looks_at_is_what_changed_since_the_last_one(tmp_path: Path) -> None:
    plane = Asked()
    world = World(tmp_path, plane=plane)
    looked_at = []
    for position in range(4):
        await world.ready(position)
        plane.rows = 0
        assert (await world.snapshotter.save_rollout_snapshot()).saved
        looked_at.append(plane.rows)
    assert looked_at == [2, 2, 2, 2]
    plane.rows = 0
    await save(world)
    assert plane.rows == 0
    assert (await world.snapshotter.save_trainer_checkpoint(write_weights)).saved
    assert plane.rows == 8, "all of it is looked at for a checkpoint"


@pytest.mark.asyncio
async def test_claims_are_counted_in_every_snapshot_of_a_step(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0, 1, 2)
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0", "e0p1")))
    await save(world)
    await world.admit(3)
    await save(world)
    counts = [
        PlainBundle(path).facts.rolled_back_train_group_count for path in world.archive.bundles()
    ]
    assert counts == [2, 2]


@pytest.mark.asyncio
async def test_a_row_that_an_open_step_has_lost_is_noticed_though_its_group_has_not_changed(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0",)))
    await save(world)
    await world.plane.clear(PARTITION, ["e0p0/1"])
    result = await world.snapshotter.save_rollout_snapshot(force=True)
    assert (result.saved, result.reason) == (False, Reason.INVARIANT_ERROR)
    assert "e0p0/1" in str(world.snapshotter.last_error)


@pytest.mark.asyncio
async def test_rows_are_counted_as_they_are_whatever_a_save_looks_at(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def counted() -> None:
        state = await save(world)
        replay = sum(len(group.sample_ids) for group in state.replay.values())
        metrics = world.metrics[-1]
        assert metrics["rollout_checkpoint/replay_rows"] == replay
        assert metrics["rollout_checkpoint/staging_rows"] == len(owned_rows(state)) - replay

    await world.ready(0, 1, 2)
    await counted()
    await world.admit(3, 4)
    await world.seal("e0p3", 0)
    await counted()
    await world.finish("e0p3")
    await world.do(drop("e0p0", 0))
    await counted()
    await world.ready(5)
    await counted()
    await world.do(drop("e0p3", 0), drop("e0p5", 0))
    await counted()


@pytest.mark.asyncio
async def test_a_chain_is_bounded_in_links_and_in_bytes(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.admit(*range(500))
    lengths = []
    for number in range(2 * MAX_DIFFERENCES + 5):
        await world.seal(f"e0p{number}", 0)
        await world.snapshotter.save_rollout_snapshot()
        base, *differences = sizes(newest(world))
        assert 2 * sum(differences) <= base
        lengths.append(len(differences))
    assert max(lengths) == MAX_DIFFERENCES
    assert lengths.count(0) == 3
    await world.ready(*range(500, 900))
    await world.snapshotter.save_rollout_snapshot()
    assert len(sizes(newest(world))) == 1, "a large change is written whole"


@pytest.mark.asyncio
async def test_claims_are_rolled_back_also_where_a_chain_begins_anew(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    await save(world)
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0", "e0p1")))
    await world.admit(*range(2, 40))
    saved, bundle = await save(world), newest(world)
    assert len(bundle.facts.state_segments) == 1, "a large change is written whole"
    assert decode(bundle.newest_link.read_bytes(), RolloutState).unwrap() == saved


@pytest.mark.asyncio
async def test_retention_keeps_every_link_that_a_chain_needs(tmp_path: Path) -> None:
    world = world_at(tmp_path, keep=1)
    await world.admit(*range(60))
    for number in range(10):
        await world.seal(f"e0p{number}", 0)
        state = await save(world)
        assert len(list((tmp_path / "bootstrap" / "snapshots").iterdir())) == 1
        assert examine(tmp_path, RealFileSystem()).notes == ()
        (path,) = (tmp_path / "bootstrap" / "snapshots").iterdir()
        assert read_state(path) == state
    world.die()
    assert examine(tmp_path, RealFileSystem()).is_whole


@pytest.mark.asyncio
@pytest.mark.parametrize("link", range(3))
async def test_damage_to_any_link_leads_to_the_save_before_it(tmp_path: Path, link: int) -> None:
    """The links of the last save, from its base on, which is the one of a checkpoint."""
    world = world_at(tmp_path)
    await world.admit(*range(20))
    await world.ready(20, 21)
    await save(world)
    await world.do(*train(world.state, "e0p20", "e0p21"))
    assert (await world.snapshotter.save_trainer_checkpoint(write_weights)).saved
    for number in range(2):
        await world.seal(f"e0p{number}", 0)
        await save(world)
    world.die()
    chosen = world_at(tmp_path).store
    assert chosen is not None
    bundle = chosen.choose().bundle
    assert bundle is not None
    assert len(bundle.facts.state_segments) == 3
    path = tmp_path / "segments" / bundle.facts.state_segments[link]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    after = world_at(tmp_path)
    restored = await after.restore()
    after.die()
    assert restored is not None
    expected = {
        0: "bootstrap/snapshots/000001",
        1: "step_000001",
        2: "step_000001/snapshots/000001",
    }
    assert restored.source.path == str(tmp_path / expected[link])


@pytest.mark.asyncio
async def test_a_save_after_one_that_failed_holds_what_both_would_have(tmp_path: Path) -> None:
    for call in ("begin", "put_segment", "publish"):
        root = tmp_path / call
        world = World(root)
        await world.admit(*range(20))
        await world.snapshotter.save_rollout_snapshot()
        await world.seal("e0p0", 0)
        world.archive.failing = {call: OSError(28, "no space left")}
        failed = await world.snapshotter.save_rollout_snapshot()
        assert failed.reason is Reason.IO_ERROR
        world.archive.failing = {}
        await world.seal("e0p1", 0)
        assert (await world.snapshotter.save_rollout_snapshot()).saved
        after = World(root)
        await after.restore()
        sealed = set(await after.rows())
        assert sealed == {"e0p0/0/attempt-0", "e0p1/0/attempt-0"}


@pytest.mark.asyncio
async def test_a_whole_state_put_in_place_is_saved_whole(tmp_path: Path) -> None:
    """A snapshotter that does not share the restorer's writer cannot know what was put in place."""
    world = World(tmp_path / "one")
    await world.admit(*range(20))
    await world.snapshotter.save_rollout_snapshot()
    other = World(tmp_path / "other")
    await other.admit(*range(40))
    await other.snapshotter.save_rollout_snapshot()
    async with other.barrier.mutation(CheckpointMutationKind.RECOVERY_RESTORE) as section:
        other.cell.restore(section, world.state)
    await other.snapshotter.save_rollout_snapshot()
    assert len(sizes(newest(other))) == 1
    after = World(tmp_path / "other")
    await after.restore()
    assert after.state == world.state


@pytest.mark.asyncio
async def test_a_bundle_without_the_segments_of_its_run_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = world_at(tmp_path / "run")
    await world.admit(0, 1)
    state = await save(world)
    world.die()
    (bundle,) = (tmp_path / "run" / "bootstrap" / "snapshots").iterdir()
    (segment,) = (tmp_path / "run" / "segments").iterdir()
    alone = tmp_path / "copy" / "000001"
    shutil.copytree(bundle, alone)
    assert main(["diff", str(bundle), str(alone)]) == 2
    said = capsys.readouterr().err
    assert f"needs the segment {tmp_path}/copy/segments/{segment.name}, which is missing" in said
    assert f"the run's segments/ to {tmp_path}/copy/segments" in said
    assert main(["verify", str(alone)]) == 2
    assert "name the run directory" in capsys.readouterr().err
    shutil.copytree(segment.parent, tmp_path / "copy" / "segments")
    assert main(["diff", str(bundle), str(alone)]) == 0
    assert read_state(alone) == state
