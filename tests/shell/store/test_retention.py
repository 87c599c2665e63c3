"""What retention keeps and removes, on a real file system."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.manifest import MANIFEST_FILE
from rollsync.shell.store import StoreError
from tests.shell.store.failing import FailingFileSystem
from tests.shell.store.kit import (
    STATE,
    WEIGHTS,
    chosen_save,
    facts,
    names,
    resumed,
    save_checkpoint,
    save_snapshot,
    state_of,
    store_at,
)

SNAPSHOT, CHECKPOINT = CheckpointKind.ROLLOUT_SNAPSHOT, CheckpointKind.TRAINER_CHECKPOINT


def test_the_snapshot_that_was_resumed_from_stays(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1, b"rows a")
    first = save_snapshot(store, 0, 2, b"rows b")
    store = resumed(tmp_path, trainer_checkpoints=1, snapshots_per_checkpoint=1)
    save_checkpoint(store, 1, 3)
    save_snapshot(store, 1, 4)
    save_checkpoint(store, 2, 5)
    assert set(store.prune()) >= {"bootstrap/snapshots/000001", "step_000001"}
    assert first.exists()
    bundle = store_at(tmp_path).choose().bundle
    assert bundle is not None
    shutil.rmtree(tmp_path / "step_000002")
    assert chosen_save(store_at(tmp_path)) == 2


def test_snapshots_from_before_a_resume_count(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for save in (1, 2, 3):
        save_snapshot(store, 0, save)
    store = resumed(tmp_path, snapshots_per_checkpoint=2)
    path = save_snapshot(store, 0, 4)
    assert path.name == "000004"
    assert store.prune() == ("bootstrap/snapshots/000001", "bootstrap/snapshots/000002")


def test_what_was_passed_over_at_one_choice_counts_when_the_next_one_takes_it(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path, snapshots_per_checkpoint=1)
    save_snapshot(store, 0, 1)
    save_snapshot(store, 0, 2)
    newest = save_snapshot(store, 0, 3) / STATE
    newest.write_bytes(state_of(9))
    assert chosen_save(store) == 2
    newest.write_bytes(state_of(3))
    assert chosen_save(store) == 3
    store.prune()
    assert names(tmp_path / "bootstrap" / "snapshots") == ["000003"]


def test_a_segment_of_a_save_under_way_stays(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1)
    draft = store.begin(SNAPSHOT, 0)
    segment = store.put_segment(b"rows")
    assert store.prune() == ()
    draft.publish(facts(SNAPSHOT, 0, mutation_version=2, segments=(segment,)), {STATE: state_of(2)})
    assert store.prune() == ()
    assert chosen_save(store_at(tmp_path)) == 2


def test_no_snapshot_is_begun_under_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with pytest.raises(FileNotFoundError):
        store.begin(SNAPSHOT, 1)
    assert "step_000001" not in names(tmp_path)


def test_a_draft_that_is_being_written_stays(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    first, segment = store.begin(CHECKPOINT, 1), store.put_segment(b"rows")
    (first.path / WEIGHTS).write_bytes(b"weights")
    save_snapshot(store, 0, 1)
    store.prune()
    first.publish(
        facts(CHECKPOINT, 1, mutation_version=2, segments=(segment,)), {STATE: state_of(2)}
    )
    assert chosen_save(store_at(tmp_path)) == 2


def test_what_cannot_be_deleted_neither_fails_a_save_nor_keeps_the_rest(tmp_path: Path) -> None:
    fs = FailingFileSystem(error_number=errno.EBUSY)
    store = store_at(tmp_path, fs=fs, snapshots_per_checkpoint=1)
    save_snapshot(store, 0, 1, b"rows a")
    save_snapshot(store, 0, 2, b"rows b")
    save_snapshot(store, 0, 3, b"rows c")
    fs.failing = [("remove_file", r"\.trash-0-000001/")]
    with pytest.raises(OSError, match="busy"):
        store.prune()
    assert names(tmp_path / "bootstrap" / "snapshots") == [".trash-0-000001", "000003"]
    assert len(names(tmp_path / "segments")) == 1
    save_snapshot(store, 0, 4, b"rows c")
    assert chosen_save(store_at(tmp_path)) == 4
    assert store.prune() == ("bootstrap/snapshots/000003",)
    fs.failing = []
    save_snapshot(store, 0, 5, b"rows c")
    assert names(tmp_path / "bootstrap" / "snapshots") == ["000004", "000005"]


@pytest.mark.parametrize(
    "failing", [("rename", r"\.trash-0-000001$"), ("sync_directory", "bootstrap/snapshots$")]
)
def test_a_bundle_that_may_keep_its_name_keeps_its_segments(
    tmp_path: Path, failing: tuple[str, str]
) -> None:
    fs = FailingFileSystem()
    store = store_at(tmp_path, fs=fs, snapshots_per_checkpoint=1)
    for save in (1, 2, 3):
        save_snapshot(store, 0, save, f"rows {save}".encode())
    fs.failing = [failing]
    with pytest.raises(OSError, match="Input/output error"):
        store.prune()
    fs.failing = []
    assert len(names(tmp_path / "segments")) == 3
    for number, directory in ((1, "000001"), (2, "000002"), (3, "000003")):
        snapshots = tmp_path / "bootstrap" / "snapshots"
        for name in (directory, f".trash-0-{directory}"):
            if (snapshots / name).exists():
                assert (snapshots / name / STATE).read_bytes() == state_of(number)
    store.prune()
    save_snapshot(store, 0, 4, b"rows 4")
    assert names(tmp_path / "bootstrap" / "snapshots") == ["000003", "000004"]


def test_what_cannot_be_read_just_now_is_passed_over_and_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1, b"rows a")
    save_snapshot(store, 0, 2, b"rows b")
    fs = FailingFileSystem(("read", "000002/" + MANIFEST_FILE))
    again = store_at(tmp_path, fs=fs, snapshots_per_checkpoint=1)
    chosen = again.choose()
    assert chosen.bundle is not None
    assert chosen.bundle.facts.mutation_version == 1
    assert "Input/output error" in chosen.refused[0].why
    save_snapshot(again, 0, 3, b"rows c")
    save_snapshot(again, 0, 4, b"rows d")
    assert again.prune() == ("bootstrap/snapshots/000003",)
    assert len(names(tmp_path / "segments")) == 4, "nobody knows which of them 000002 needs"
    fs.failing = []
    assert len(again.prune()) == 1, "the segment of 000003"
    assert names(tmp_path / "bootstrap" / "snapshots") == ["000001", "000002", "000004"]


def test_a_run_that_goes_on_from_before_a_checkpoint_makes_that_step_anew(tmp_path: Path) -> None:
    """The checkpoint of step 2 is whole, and could not be read when the run resumed."""
    store = store_at(tmp_path)
    save_checkpoint(store, 1, 1)
    save_checkpoint(store, 2, 2)
    fs = FailingFileSystem(("read", "step_000002/" + MANIFEST_FILE))
    again = store_at(tmp_path, fs=fs, trainer_checkpoints=1, snapshots_per_checkpoint=1)
    assert chosen_save(again) == 1
    fs.failing = []
    path = save_snapshot(again, 1, 3)
    again.prune()
    assert path.exists(), "it is the newest of this run's own past"
    save_checkpoint(again, 2, 4)
    assert chosen_save(store_at(tmp_path)) == 4
    again.prune()
    assert chosen_save(store_at(tmp_path)) == 4


def test_a_directory_that_cannot_be_listed_is_a_reason_and_stops_a_prune(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_checkpoint(store, 1, 1)
    save_snapshot(store, 1, 2)
    fs = FailingFileSystem(("list_directory", "step_000001/snapshots"))
    again = store_at(tmp_path, fs=fs)
    chosen = again.choose()
    assert chosen.bundle is not None
    assert chosen.bundle.facts.mutation_version == 1
    assert chosen.refused[0].path.endswith("step_000001/snapshots")
    with pytest.raises(OSError, match="cannot be listed"):
        again.prune()
    fs.failing = [("list_directory", f"{tmp_path.name}$")]
    with pytest.raises(StoreError, match="cannot be listed"):
        again.choose()
