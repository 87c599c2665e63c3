"""The rules about what is on disk, one by one, on a real file system."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.codecs import decode
from rollsync.pure.config import ModelConfig
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.errors import DirectoryInUse, FileSystemRefused
from rollsync.pure.snapshot.manifest import MANIFEST_FILE, RolloutSnapshotManifest
from rollsync.pure.snapshot.places import LOCK_FILE
from rollsync.shell.store import RealFileSystem, SnapshotStore, StoreError, examine
from tests.crash.operations import SimulatedFileSystem
from tests.shell.store.failing import FailingFileSystem
from tests.shell.store.kit import (
    STATE,
    WEIGHTS,
    chosen_save,
    config,
    facts,
    names,
    resumed,
    save_checkpoint,
    save_snapshot,
    state_of,
    store_at,
)

SNAPSHOT, CHECKPOINT = CheckpointKind.ROLLOUT_SNAPSHOT, CheckpointKind.TRAINER_CHECKPOINT


def tree(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(directory)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mtime_ns,
        )
        for path in directory.rglob("*")
    }


# 1. What a bundle holds.


def test_the_manifest_lists_every_file_and_segment(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    draft = store.begin(CHECKPOINT, 3)
    (draft.path / "environment" / "worker").mkdir(parents=True)
    (draft.path / "environment" / "worker" / "episodes").write_bytes(b"12345")
    (draft.path / WEIGHTS).write_bytes(b"")
    segment = store.put_segment(b"rows")
    path = draft.publish(facts(CHECKPOINT, 3, segments=(segment,)), {STATE: b"state"})
    manifest = decode((path / MANIFEST_FILE).read_bytes(), RolloutSnapshotManifest).unwrap()
    assert [(file.name, file.size_bytes) for file in manifest.files] == [
        ("environment/worker/episodes", 5),
        (STATE, 5),
        (WEIGHTS, 0),
    ]
    assert [(each.digest, each.size_bytes) for each in manifest.segments] == [(segment, 4)]
    assert manifest.facts == facts(CHECKPOINT, 3, segments=(segment,))


@pytest.mark.parametrize("name", ["snapshots/a", MANIFEST_FILE])
def test_a_file_with_a_reserved_name_is_refused(tmp_path: Path, name: str) -> None:
    draft = store_at(tmp_path).begin(CHECKPOINT, 1)
    (draft.path / name).parent.mkdir(exist_ok=True)
    (draft.path / name).write_bytes(b"")
    with pytest.raises(StoreError, match=name.partition("/")[0]):
        draft.publish(facts(CHECKPOINT, 1), {STATE: b""})
    draft.abandon()
    assert chosen_save(store_at(tmp_path)) == 0


def test_a_link_among_the_trainers_files_is_refused(tmp_path: Path) -> None:
    draft = store_at(tmp_path).begin(CHECKPOINT, 1)
    (draft.path / WEIGHTS).symlink_to(tmp_path)
    with pytest.raises(StoreError, match="no regular file"):
        draft.publish(facts(CHECKPOINT, 1), {STATE: b""})


def test_rows_that_were_written_before_are_not_written_again(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1, b"rows a")
    segment = next((tmp_path / "segments").iterdir())
    written = segment.stat().st_ino
    save_snapshot(store, 0, 2, b"rows a")
    save_snapshot(resumed(tmp_path), 0, 3, b"rows a")
    save_snapshot(store_at(tmp_path), 0, 4, b"rows a")
    assert [path.stat().st_ino for path in (tmp_path / "segments").iterdir()] == [written]


def test_a_damaged_segment_is_written_again_and_heals_its_snapshots(tmp_path: Path) -> None:
    save_snapshot(store_at(tmp_path), 0, 1, b"rows a")
    segment = next((tmp_path / "segments").iterdir())
    segment.write_bytes(b"rows b")
    with pytest.raises(StoreError, match="other content"):
        store_at(tmp_path).choose()
    store = store_at(tmp_path)
    store.put_segment(b"rows a")
    assert chosen_save(store_at(tmp_path)) == 1
    assert names(tmp_path / "segments") == [segment.name]


def test_a_choice_believes_only_what_it_reads(tmp_path: Path) -> None:
    """Also that of a process which has written or verified all of it before."""
    store = store_at(tmp_path)
    checkpoint = save_checkpoint(store, 1, 1)
    path = save_snapshot(store, 1, 2, b"rows a")
    assert chosen_save(store) == 2
    segment = next((tmp_path / "segments").iterdir())
    for damaged in (path / STATE, segment, checkpoint / "trainer" / WEIGHTS):
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-1] + b"?")
        if damaged == segment:
            assert chosen_save(store) == 1
            store.put_segment(b"rows a")
            assert segment.read_bytes() == whole
        elif damaged.parent == path:
            assert chosen_save(store) == 1
        else:
            with pytest.raises(StoreError, match="other content"):
                store.choose()
        damaged.write_bytes(whole)
        assert chosen_save(store) == 2


def test_a_bundle_without_one_of_its_segments_is_not_published(tmp_path: Path) -> None:
    draft = store_at(tmp_path).begin(SNAPSHOT, 0)
    with pytest.raises(FileNotFoundError):
        draft.publish(facts(SNAPSHOT, 0, segments=("0a" * 32,)), {STATE: b""})
    draft.abandon()
    assert store_at(tmp_path).choose().bundle is None


# 2 and 5. Publication, and what an error means.


@pytest.mark.parametrize(
    "failing",
    [
        ("create", STATE),
        ("create", MANIFEST_FILE),
        ("sync_file", WEIGHTS),
        ("read", WEIGHTS),
        ("sync_directory", "step_000001$"),
        ("rename", "step_000001$"),
    ],
)
def test_an_error_before_the_name_publishes_nothing_and_is_forgotten(
    tmp_path: Path, failing: tuple[str, str]
) -> None:
    fs = FailingFileSystem()
    store = store_at(tmp_path, fs=fs)
    save_snapshot(store, 0, 1)
    draft = store.begin(CHECKPOINT, 1)
    (draft.path / WEIGHTS).write_bytes(b"weights")
    fs.failing = [failing]
    with pytest.raises(OSError, match="Input/output error"):
        draft.publish(facts(CHECKPOINT, 1, mutation_version=2), {STATE: state_of(2)})
    draft.abandon()
    fs.failing = []
    assert "step_000001" not in names(tmp_path)
    assert not store.has_anchor(1)
    assert chosen_save(store_at(tmp_path)) == 1
    save_checkpoint(store, 1, 2)
    assert chosen_save(store_at(tmp_path)) == 2
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_an_error_after_the_name_is_no_failure_but_a_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs = FailingFileSystem()
    store = store_at(tmp_path, fs=fs, trainer_checkpoints=1)
    save_checkpoint(store, 1, 1)
    draft = store.begin(CHECKPOINT, 2)
    fs.failing = [("sync_directory", f"{tmp_path.name}$")]
    path = draft.publish(facts(CHECKPOINT, 2, mutation_version=2), {STATE: state_of(2)})
    draft.abandon()
    fs.failing = []
    assert fs.failed == 1
    assert path.exists()
    assert "may be gone after a power failure" in caplog.text
    assert chosen_save(store_at(tmp_path)) == 2
    # As long as it may be gone, nothing relies on it.
    assert not store.has_anchor(2)
    assert store.prune() == ()
    save_checkpoint(store, 3, 3)
    assert store.prune() == ("step_000001",)


def test_a_rename_that_only_said_it_failed_has_published(tmp_path: Path) -> None:
    fs = FailingFileSystem(error_number=errno.ENOENT)
    store = store_at(tmp_path, fs=fs)
    draft = store.begin(SNAPSHOT, 0)
    fs.failing = [("rename and say that it failed", "000001")]
    path = draft.publish(facts(SNAPSHOT, 0, mutation_version=1), {STATE: state_of(1)})
    draft.abandon()
    assert fs.failed == 1
    assert path.exists()
    assert chosen_save(store_at(tmp_path)) == 1


class Overtaken(RealFileSystem):
    """Somebody else takes the name just before it is given."""

    def rename(self, source: Path, target: Path) -> None:
        if target.name == "000001":
            target.mkdir()
            (target / "theirs").write_bytes(b"")
        super().rename(source, target)


def test_a_name_that_another_has_taken_meanwhile_is_not_ours(tmp_path: Path) -> None:
    store = store_at(tmp_path, fs=Overtaken())
    draft = store.begin(SNAPSHOT, 0)
    with pytest.raises(FileExistsError):
        draft.publish(facts(SNAPSHOT, 0, mutation_version=1), {STATE: state_of(1)})
    draft.abandon()
    assert names(tmp_path / "bootstrap" / "snapshots" / "000001") == ["theirs"]
    with pytest.raises(StoreError, match="missing"):
        store_at(tmp_path).choose()


class Vanishing(RealFileSystem):
    """What is to get its name is gone, under any name."""

    def rename(self, source: Path, target: Path) -> None:
        if target.name == "000001":
            shutil.rmtree(source)
        super().rename(source, target)


def test_what_is_gone_before_it_has_its_name_is_not_published(tmp_path: Path) -> None:
    store = store_at(tmp_path, fs=Vanishing())
    draft = store.begin(SNAPSHOT, 0)
    with pytest.raises(FileNotFoundError):
        draft.publish(facts(SNAPSHOT, 0, mutation_version=1), {STATE: state_of(1)})
    draft.abandon()
    assert chosen_save(store_at(tmp_path)) == 0


def test_abandoning_after_publication_does_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    draft = store.begin(SNAPSHOT, 0)
    draft.publish(facts(SNAPSHOT, 0, mutation_version=1), {STATE: state_of(1)})
    draft.abandon()
    assert chosen_save(store_at(tmp_path)) == 1


def test_an_abandoned_draft_leaves_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    draft = store.begin(SNAPSHOT, 0)
    (draft.path / "environment").mkdir()
    (draft.path / "environment" / "episodes").write_bytes(b"1")
    draft.abandon()
    draft.abandon()
    assert names(tmp_path / "bootstrap" / "snapshots") == []


def test_a_draft_that_cannot_be_deleted_is_left_to_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs = FailingFileSystem()
    store = store_at(tmp_path, fs=fs)
    draft = store.begin(SNAPSHOT, 0)
    (draft.path / "episodes").write_bytes(b"1")
    fs.failing = [("remove_file", "episodes")]
    draft.abandon()
    assert "is left to the next save" in caplog.text
    assert draft.path.exists()
    fs.failing = []
    save_snapshot(store, 0, 1)
    store.prune()
    assert names(tmp_path / "bootstrap" / "snapshots") == ["000001"]


# 3. Nothing is replaced, and choosing writes nothing.


def test_a_checkpoint_is_not_replaced_by_another_of_the_same_step(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_checkpoint(store, 1, 1)
    for again in (store, store_at(tmp_path)):
        with pytest.raises(FileExistsError):
            save_checkpoint(again, 1, 2)
    assert chosen_save(store_at(tmp_path)) == 1


def test_no_checkpoint_takes_the_place_of_the_bootstrap_anchor(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1)
    with pytest.raises(ValueError, match="none was trained"):
        store.begin(CHECKPOINT, 0)
    assert chosen_save(store_at(tmp_path)) == 1


def test_a_damaged_checkpoint_gives_way_to_another_of_the_same_step(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1)
    save_snapshot(store, 0, 2)
    path = save_checkpoint(store, 1, 3)
    save_snapshot(store, 1, 4)
    (path / "trainer" / WEIGHTS).unlink()
    again = resumed(tmp_path)
    assert not again.has_anchor(1)
    draft = again.begin(CHECKPOINT, 1)
    assert path.exists(), "until the new one is whole"
    draft.publish(facts(CHECKPOINT, 1, mutation_version=5), {STATE: state_of(5)})
    assert again.has_anchor(1)
    assert chosen_save(store_at(tmp_path)) == 5
    save_snapshot(again, 1, 6)
    assert chosen_save(store_at(tmp_path)) == 6
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_damaged_checkpoint_stays_until_another_of_its_step_is_durable(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    store = store_at(tmp_path, fs=fs)
    save_snapshot(store, 0, 1)
    path = save_checkpoint(store, 1, 2)
    (path / STATE).write_bytes(state_of(7))
    assert chosen_save(store) == 1
    draft = store.begin(CHECKPOINT, 1)
    fs.failing = [("sync_directory", r"\.draft-[0-9]+-step_000001$")]
    with pytest.raises(OSError, match="Input/output error"):
        draft.publish(facts(CHECKPOINT, 1, mutation_version=3), {STATE: state_of(3)})
    assert fs.failed == 1
    assert (path / "trainer" / WEIGHTS).exists()


def test_a_checkpoint_made_anew_has_a_place_for_snapshots(tmp_path: Path) -> None:
    """By the process that made the one before it, which remembers the directories of that."""
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1)
    path = save_checkpoint(store, 1, 2)
    save_snapshot(store, 1, 3)
    (path / "trainer" / WEIGHTS).unlink()
    assert chosen_save(store) == 1
    save_checkpoint(store, 1, 4)
    save_snapshot(store, 1, 5)
    assert chosen_save(store_at(tmp_path)) == 5


def test_what_was_verified_or_published_is_not_read_again(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_checkpoint(store, 1, 1, b"rows")
    save_snapshot(store, 1, 2, b"rows", b"more rows")
    save_snapshot(store, 1, 3, b"rows", b"more rows")
    fs = FailingFileSystem()
    again = store_at(tmp_path, fs=fs)
    assert again.choose().bundle is not None
    fs.failing = [("read", "rollout_state|weights|segments/")]
    assert again.has_anchor(1)
    save_snapshot(again, 1, 4, b"rows", b"more rows")
    again.prune()
    assert fs.failed == 0
    fs.failing = []
    assert chosen_save(store_at(tmp_path)) == 4


def test_what_was_damaged_at_the_choice_goes_once_something_newer_is_whole(tmp_path: Path) -> None:
    """Of the same size, so that only its content tells."""
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1)
    path = save_snapshot(store, 0, 2)
    (path / STATE).write_bytes(state_of(7))
    again = store_at(tmp_path)
    assert chosen_save(again) == 1
    again.prune()
    assert path.exists(), "nothing newer is whole"
    save_snapshot(again, 0, 3)
    again.prune()
    assert names(tmp_path / "bootstrap" / "snapshots") == ["000001", "000003"]


def test_weights_that_cannot_be_read_just_now_may_be_read_the_next_time(tmp_path: Path) -> None:
    save_checkpoint(store_at(tmp_path), 1, 1)
    fs = FailingFileSystem(("read", WEIGHTS))
    again = store_at(tmp_path, fs=fs)
    assert not again.has_anchor(1)
    fs.failing = []
    assert again.has_anchor(1)


def test_a_directory_is_prepared_once(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    store = store_at(tmp_path, fs=fs)
    save_snapshot(store, 0, 1, b"rows")
    fs.failing = [("create", "probe"), ("read", "anchor")]
    save_snapshot(store, 0, 2, b"more rows")
    store.prune()
    assert fs.failed == 0


def test_rows_that_retention_removed_are_written_again(tmp_path: Path) -> None:
    store = store_at(tmp_path, snapshots_per_checkpoint=1)
    save_snapshot(store, 0, 1, b"rows")
    save_snapshot(store, 0, 2)
    store.prune()
    assert names(tmp_path / "segments") == []
    save_snapshot(store, 0, 3, b"rows")
    assert chosen_save(store_at(tmp_path)) == 3


def test_segments_of_a_save_that_was_given_up_go_with_the_next_prune(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1)
    draft = store.begin(SNAPSHOT, 0)
    store.put_segment(b"rows of nobody")
    draft.abandon()
    store.prune()
    assert names(tmp_path / "segments") == []


def test_a_bundle_that_cannot_be_retired_keeps_no_other_from_it(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    store = store_at(tmp_path, fs=fs, snapshots_per_checkpoint=1)
    for save in (1, 2, 3):
        save_snapshot(store, 0, save)
    fs.failing = [("rename", r"\.trash-0-000001$")]
    with pytest.raises(OSError, match="Input/output error"):
        store.prune()
    assert names(tmp_path / "bootstrap" / "snapshots") == ["000001", "000003"]


def test_choosing_writes_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_checkpoint(store, 1, 1, b"rows")
    path = save_snapshot(store, 1, 2, b"rows")
    (path / STATE).unlink()
    (tmp_path / ".draft-0-step_000002").mkdir()
    before = tree(tmp_path)
    assert chosen_save(store_at(tmp_path)) == 1
    assert tree(tmp_path) == before


def test_leftovers_are_swept_by_the_next_save_and_nothing_else_is(tmp_path: Path) -> None:
    save_checkpoint(store_at(tmp_path), 1, 1)
    save_snapshot(store_at(tmp_path), 1, 2)
    (tmp_path / "journal.jsonl").write_bytes(b"{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "step_000001" / "snapshots" / "notes").mkdir()
    for left in (
        tmp_path / ".draft-0-step_000002",
        tmp_path / ".trash-3-step_000000",
        tmp_path / "step_000001" / "snapshots" / ".draft-1-000002",
        tmp_path / "bootstrap" / "snapshots" / ".trash-0-000001",
    ):
        (left / "deep").mkdir(parents=True)
        (left / "deep" / "file").write_bytes(b"1")
    (tmp_path / "segments" / f".draft-0-{'0' * 64}").write_bytes(b"half")
    (tmp_path / "bootstrap" / ".draft-0-anchor.bin").write_bytes(b"half")
    store = resumed(tmp_path)
    save_snapshot(store, 1, 3)
    store.prune()
    assert not list(tmp_path.rglob(".draft-*"))
    assert not list(tmp_path.rglob(".trash-*"))
    assert (tmp_path / "journal.jsonl").read_bytes() == b"{}"
    assert (tmp_path / ".cache").is_dir()
    assert (tmp_path / "step_000001" / "snapshots" / "notes").is_dir()


# 6. Order, and copies.


def test_a_hundred_is_newer_than_nine(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    path = save_snapshot(store, 0, 9)
    for number in (9, 10, 100, 1000000):
        shutil.copytree(path, path.with_name(f"{number:06d}"))
    chosen = store_at(tmp_path).choose().bundle
    assert chosen is not None
    assert chosen.path.name == "1000000"
    assert save_snapshot(store_at(tmp_path), 0, 10).name == "1000001"


def test_a_copied_run_directory_is_as_good_as_the_original(tmp_path: Path) -> None:
    store = store_at(tmp_path / "run")
    save_checkpoint(store, 1, 1, b"rows a")
    save_snapshot(store, 1, 2, b"rows b")
    shutil.copytree(tmp_path / "run", tmp_path / "elsewhere" / "copy", copy_function=shutil.copy)
    shutil.rmtree(tmp_path / "run")
    copy = resumed(tmp_path / "elsewhere" / "copy")
    assert chosen_save(copy) == 2
    save_snapshot(copy, 1, 3, b"rows b")
    assert chosen_save(store_at(tmp_path / "elsewhere" / "copy")) == 3


# 7. File systems, and the other writer.


def test_a_file_system_that_cannot_is_refused_by_name(tmp_path: Path) -> None:
    fs = FailingFileSystem()
    fs.type = "fuse.s3fs"
    with pytest.raises(StoreError, match=r"fuse\.s3fs") as raised:
        store_at(tmp_path, fs=fs).has_anchor(0)
    assert isinstance(raised.value.value, FileSystemRefused)
    without_sync = FailingFileSystem(("sync_directory", "probe"), error_number=errno.EINVAL)
    with pytest.raises(StoreError, match="durable"):
        store_at(tmp_path, fs=without_sync).has_anchor(0)
    assert names(tmp_path) == [LOCK_FILE]


WRITING = """
import sys
from pathlib import Path
from tests.shell.store.kit import save_snapshot, store_at
store = store_at(Path(sys.argv[1]))
save_snapshot(store, 0, 1)
print("saved", flush=True)
sys.stdin.read()
"""


def test_two_runs_do_not_write_to_one_directory(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITING, tmp_path / "run"],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    store = store_at(tmp_path / "run")
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saved\n"
        with pytest.raises(StoreError, match="another process") as raised:
            save_snapshot(store, 0, 2)
        assert isinstance(raised.value.value, DirectoryInUse)
        assert chosen_save(store) == 1
        writer.kill()
    save_snapshot(store, 0, 2)
    assert chosen_save(store) == 2
    store.close()


# Whose directory it is.


def test_a_run_whose_model_has_moved_goes_on(tmp_path: Path) -> None:
    """Also when it is moved once more: every save has the fingerprint that the first one had."""

    def store(model: str) -> SnapshotStore:
        named = ModelConfig(path=model, digest="1" * 64)
        return store_at(tmp_path, master_config=replace(config(), model=named))

    save_snapshot(store("here"), 0, 1)
    moved = store("there")
    assert chosen_save(moved) == 1
    save_snapshot(moved, 0, 2)
    unchosen = store("elsewhere")
    save_snapshot(unchosen, 0, 3)
    assert chosen_save(store("here")) == 3
    assert examine(tmp_path, RealFileSystem()).is_whole


def test_a_claim_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_snapshot(store_at(tmp_path), 0, 1)
    other = store_at(tmp_path, master_config=config(seed=7))
    with pytest.raises(StoreError, match=r"run\.seed"):
        other.claim()
    files = SimulatedFileSystem()
    files.make_directory(Path("/runs"))
    first = store_at(Path("/runs/run"), fs=files)
    save_snapshot(first, 0, 1)
    first.close()
    with pytest.raises(StoreError, match=r"run\.seed"):
        store_at(Path("/runs/run"), fs=files, master_config=config(seed=7)).claim()
    assert not files.locked, "the run that it is may write to it"
    fresh = tmp_path / "fresh"
    store_at(fresh).claim()
    assert [path.name for path in fresh.iterdir()] == [LOCK_FILE]


def test_a_damaged_anchor_is_made_again_and_refuses_nobody(tmp_path: Path) -> None:
    save_snapshot(store_at(tmp_path), 0, 1)
    anchor = tmp_path / "bootstrap" / "anchor.bin"
    whole = anchor.read_bytes()
    for damage in (b"", whole[:-1], whole[:-1] + b"x"):
        anchor.write_bytes(damage)
        store = resumed(tmp_path)
        assert store.has_anchor(0)
        assert anchor.read_bytes() == whole
    anchor.unlink()
    assert resumed(tmp_path).has_anchor(0)
    assert anchor.read_bytes() == whole


def test_another_run_does_not_take_over_a_directory_whose_anchor_is_damaged(
    tmp_path: Path,
) -> None:
    save_snapshot(store_at(tmp_path), 0, 1)
    (tmp_path / "bootstrap" / "anchor.bin").write_bytes(b"")
    other = store_at(tmp_path, dataset_digest="d1")
    with pytest.raises(StoreError, match="fingerprint"):
        other.choose()
    with pytest.raises(StoreError, match="belongs to another run"):
        other.has_anchor(0)
    assert (tmp_path / "bootstrap" / "anchor.bin").read_bytes() == b""


def test_an_anchor_that_cannot_be_read_just_now_is_not_replaced(tmp_path: Path) -> None:
    save_snapshot(store_at(tmp_path), 0, 1)
    whole = (tmp_path / "bootstrap" / "anchor.bin").read_bytes()
    store = store_at(tmp_path, fs=FailingFileSystem(("read", "anchor.bin")))
    with pytest.raises(OSError, match="anchor"):
        store.has_anchor(0)
    assert (tmp_path / "bootstrap" / "anchor.bin").read_bytes() == whole


def test_a_bundle_of_another_run_is_passed_over(tmp_path: Path) -> None:
    save_snapshot(store_at(tmp_path / "run"), 0, 1)
    stranger = save_snapshot(store_at(tmp_path / "other", dataset_digest="d1"), 0, 9)
    stranger.rename(tmp_path / "run" / "bootstrap" / "snapshots" / "000002")
    chosen = store_at(tmp_path / "run").choose()
    assert chosen.bundle is not None
    assert chosen.bundle.facts.mutation_version == 1
    assert "fingerprint" in chosen.refused[0].why
