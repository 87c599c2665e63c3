"""Whole saves and restores over the real store: damage, failures of every file operation, age."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollsync.pure.config import CheckpointingConfig, RetentionConfig
from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from rollsync.pure.rollout.checkpointing import RolloutTraceKind as Kind
from rollsync.pure.rollout.state import RolloutState
from rollsync.pure.snapshot.selection import RefusedBundle
from rollsync.shell.rollout.data_plane import Row
from rollsync.shell.rollout.environments.guessing import GuessingGame
from rollsync.shell.store.errors import StoreError
from rollsync.shell.store.filesystem import RealFileSystem, WritableFile
from tests.pure.rollout.events_kit import train
from tests.shell.rollout.world import World, assert_same_rows, row_of


def world_at(
    root: Path,
    *,
    fs: RealFileSystem | None = None,
    keep: int = 2,
    environment: GuessingGame | None = None,
) -> World:
    retention = RetentionConfig(snapshots_per_checkpoint=keep)
    return World(
        root,
        store_on=RealFileSystem() if fs is None else fs,
        checkpointing=CheckpointingConfig(retention=retention),
        environment=environment,
    )


async def save(world: World) -> None:
    result = await world.snapshotter.save_rollout_snapshot(force=True)
    assert (result.saved, result.reason) == (True, Reason.COMPLETED), world.snapshotter.last_error


async def write_weights(directory: Path) -> None:
    (directory / "trainer").mkdir()
    (directory / "trainer" / "weights.bin").write_bytes(b"weights")


async def resumed(root: Path) -> World:
    world = world_at(root)
    assert await world.restore() is not None
    world.die()
    return world


def snapshots(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "bootstrap" / "snapshots").iterdir())


async def two_saves(root: Path) -> tuple[World, RolloutState]:
    """A run that was saved twice and died, and its state at the first save."""
    world = world_at(root)
    await world.ready(0, 1)
    await world.admit(2, 3)
    await world.seal("e0p2", 0)
    await save(world)
    first = world.state
    await world.finish("e0p2")
    await save(world)
    world.die()
    return world, first


@pytest.mark.asyncio
async def test_the_newest_save_is_taken_with_its_rows(tmp_path: Path) -> None:
    world, _ = await two_saves(tmp_path)
    after = await resumed(tmp_path)
    assert after.state.replay == world.state.replay
    for key, row in (await after.rows()).items():
        assert_same_rows({key: row}, {key: row_of(key)})


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def swapped(path: Path) -> None:
    """With the file of the same name of the snapshot before."""
    other = path.parent.parent / "000001" / path.name
    mine = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def deleted(path: Path) -> None:
    path.unlink()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["data_plane.bin", "manifest.bin"])
@pytest.mark.parametrize("damage", [deleted, emptied, truncated, flipped])
async def test_a_damaged_file_of_the_newest_leads_to_the_one_before(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    _, first = await two_saves(tmp_path)
    damage(tmp_path / "bootstrap" / "snapshots" / "000002" / name)
    after = world_at(tmp_path)
    restored = await after.restore()
    after.die()
    assert after.state.replay == first.replay
    (refused,) = [
        event for event in after.trace.trace.events if event.kind is Kind.CANDIDATE_REFUSED
    ]
    assert refused.subject.endswith("000002")
    assert refused.detail
    assert restored is not None
    assert restored.refused == (RefusedBundle(path=refused.subject, why=refused.detail),)


@pytest.mark.asyncio
async def test_swapped_files_leave_nothing_to_take_and_every_reason_is_said(
    tmp_path: Path,
) -> None:
    await two_saves(tmp_path)
    swapped(tmp_path / "bootstrap" / "snapshots" / "000002" / "data_plane.bin")
    world = world_at(tmp_path)
    with pytest.raises(StoreError) as caught:
        await world.restore()
    assert "000001" in str(caught.value)
    assert "000002" in str(caught.value)


@pytest.mark.asyncio
async def test_a_missing_segment_leads_to_a_snapshot_that_does_not_need_it(tmp_path: Path) -> None:
    world = world_at(tmp_path)
    await world.ready(0, 1)
    await save(world)
    before = {path.name for path in (tmp_path / "segments").iterdir()}
    await world.ready(2)
    await save(world)
    world.die()
    newer = [path for path in (tmp_path / "segments").iterdir() if path.name not in before]
    assert len(newer) == 2, "one of rows and one of the state"
    newer[0].unlink()
    after = await resumed(tmp_path)
    assert set(after.state.replay) == {"e0p0", "e0p1"}


@pytest.mark.asyncio
async def test_100_is_newer_than_9_and_10(tmp_path: Path) -> None:
    world = world_at(tmp_path, keep=200)
    for position in range(100):
        await world.admit(position)
        if position in (8, 9, 99) or position < 3:
            await save(world)
    world.die()
    root = tmp_path / "bootstrap" / "snapshots"
    for old, new in (("000006", "000100"), ("000005", "000010"), ("000004", "000009")):
        (root / old).rename(root / new)
    after = await resumed(tmp_path)
    assert len(after.state.ledger.groups) == 100


@pytest.mark.asyncio
async def test_retention_counts_older_processes_snapshots_and_keeps_the_one_resumed_from(
    tmp_path: Path,
) -> None:
    world, _ = await two_saves(tmp_path)
    for number in range(3):
        world = world_at(tmp_path)
        await world.restore()
        await world.admit(4 + number)
        await save(world)
        await save(world)
        world.die()
    names = snapshots(tmp_path)
    assert names == ["000006", "000007", "000008"], "two, and the one that was resumed from"
    assert (await resumed(tmp_path)).state.ledger.groups.keys() >= {"e0p6"}


@pytest.mark.asyncio
async def test_segments_that_no_snapshot_lists_are_removed(tmp_path: Path) -> None:
    world = world_at(tmp_path, keep=1)
    await world.ready(*range(4))
    await save(world)
    old = {path.name for path in (tmp_path / "segments").iterdir()}
    await world.do(*train(world.state, "e0p0", "e0p1", "e0p2", "e0p3"))
    assert (await world.snapshotter.save_trainer_checkpoint(write_weights)).saved
    await world.ready(4)
    await save(world)
    world.die()
    kept = {path.name for path in (tmp_path / "segments").iterdir()}
    assert not old & kept or (tmp_path / "bootstrap" / "snapshots").exists()
    after = await resumed(tmp_path)
    assert set(after.state.replay) == {"e0p4"}
    assert after.state.progress.train_steps == 1


@pytest.mark.asyncio
async def test_a_copied_run_directory_resumes(tmp_path: Path) -> None:
    world, _ = await two_saves(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "copy")
    shutil.rmtree(tmp_path / "run")
    after = await resumed(tmp_path / "elsewhere" / "copy")
    assert after.state.replay == world.state.replay


@pytest.mark.asyncio
async def test_an_environments_files_are_part_of_the_bundle(tmp_path: Path) -> None:
    playing = await GuessingGame.start()
    world = world_at(tmp_path, environment=playing)
    await world.admit(0)
    await save(world)
    await save(world)
    world.die()
    flipped(tmp_path / "bootstrap" / "snapshots" / "000002" / "environment" / "episodes.json")
    after = world_at(tmp_path, environment=playing)
    restored = await after.restore()
    await playing.close()
    assert restored is not None
    assert str(restored.source.path).endswith("000001")


@pytest.mark.asyncio
async def test_another_runs_directory_is_neither_resumed_from_nor_saved_into(
    tmp_path: Path,
) -> None:
    await two_saves(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    other = World(tmp_path, store_on=RealFileSystem(), num_prompts_per_step=3)
    with pytest.raises(StoreError, match=r"grpo\.num_prompts_per_step"):
        await other.restore()
    await other.ready(0)
    result = await other.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (False, Reason.INVARIANT_ERROR)
    assert isinstance(other.snapshotter.last_error, StoreError)
    other.die()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


class FailingFileSystem(RealFileSystem):
    """Counts operations that change something, and fails at one of them.

    Nothing is synced for real: no power fails here, and the disk is shared with other tests.
    """

    def __init__(self, error_number: int) -> None:
        self.operations = 0
        self.fail_at: int | None = None
        self._error_number = error_number

    def _count(self, path: Path) -> None:
        self.operations += 1
        if self.operations == self.fail_at:
            raise OSError(self._error_number, "injected", str(path))

    def create(self, path: Path) -> WritableFile:
        self._count(path)
        return _FailingFile(super().create(path), lambda: self._count(path))

    def sync_file(self, path: Path) -> None:
        self._count(path)

    def sync_directory(self, path: Path) -> None:
        self._count(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count(source)
        super().rename(source, target)

    def make_directory(self, path: Path) -> None:
        self._count(path)
        super().make_directory(path)

    def remove_file(self, path: Path) -> None:
        self._count(path)
        super().remove_file(path)

    def remove_directory(self, path: Path) -> None:
        self._count(path)
        super().remove_directory(path)


class _FailingFile:
    def __init__(self, file: WritableFile, count: Callable[[], None]) -> None:
        self._file, self._count = file, count

    def write(self, data: bytes | memoryview) -> int:
        self._count()
        return self._file.write(data)

    def sync(self) -> None:
        self._count()

    def close(self) -> None:
        self._file.close()


async def owned_rows_are_right(world: World, expected: RolloutState) -> None:
    keys = {key for group in expected.replay.values() for key in group.sample_ids}
    there: dict[str, Row] = {
        key: row for key, row in (await world.rows()).items() if "attempt" not in key
    }
    assert_same_rows(there, {key: row_of(key) for key in keys})


@pytest.mark.asyncio
@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", ["snapshot", "checkpoint"])
async def test_a_save_that_fails_anywhere_is_whole_or_not_there_and_the_next_one_works(
    tmp_path: Path, error_number: int, kind: str
) -> None:
    """Every operation of one save fails in turn."""
    outcomes: list[bool] = []
    for nth in range(1, 1000):
        root = tmp_path / str(nth)
        fs = FailingFileSystem(error_number)
        world = world_at(root, fs=fs)
        await world.ready(0, 1)
        await save(world)
        before = world.state
        if kind == "checkpoint":
            await world.do(*train(world.state, "e0p0"))
        await world.ready(2)
        fs.operations, fs.fail_at = 0, nth
        result = (
            await world.snapshotter.save_rollout_snapshot()
            if kind == "snapshot"
            else await world.snapshotter.save_trainer_checkpoint(write_weights)
        )
        if fs.operations < nth:
            break
        fs.fail_at = None
        outcomes.append(result.saved)
        assert result.reason in (Reason.COMPLETED, Reason.IO_ERROR), world.snapshotter.last_error
        expected = world.state if result.saved else before
        died = await resumed(root)
        assert died.state.replay == expected.replay, f"operation {nth}"
        await owned_rows_are_right(died, expected)
        if not result.saved and kind == "snapshot":
            assert (await world.snapshotter.save_rollout_snapshot()).saved, f"operation {nth}"
        world.die()
        shutil.rmtree(root)
    assert any(outcomes), "failures after the rename are saves"
    assert not all(outcomes)
    assert len(outcomes) > 10


@pytest.mark.asyncio
async def test_the_resumed_counters_go_on(tmp_path: Path) -> None:
    """Step, version, epoch and position after a resume are those of the save, not the beginning."""
    world = world_at(tmp_path)
    for step in (1, 2, 3):
        position = step - 1
        await world.ready(position)
        await world.do(*train(world.state, f"e0p{position}"))
        assert (await world.snapshotter.save_trainer_checkpoint(write_weights)).saved
        world.die()
        world = world_at(tmp_path)
        restored = await world.restore()
        assert restored is not None
        assert restored.trainer_path is not None
        assert (restored.trainer_path / "trainer" / "weights.bin").read_bytes() == b"weights"
        assert not restored.source.from_rollout_snapshot
        assert world.state.progress.train_steps == step
        assert world.state.progress.trainer_version == step
        assert world.state.dataloader_state.position == position + 1
    world.die()
