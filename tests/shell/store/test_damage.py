"""Any damage to any file of the newest snapshot is noticed, and the one before is taken.

The snapshot is small, so that every single bit of it can be flipped and every truncation made.
"""

from __future__ import annotations

import hashlib
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.codecs import decode, encode
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.manifest import (
    MANIFEST_FILE,
    RolloutSnapshotManifest,
    SnapshotFile,
    is_of_rollout,
)
from rollsync.shell.rollout.archive import ENVIRONMENT_DIRECTORY, STATE_FILE
from rollsync.shell.rollout.captured import DATA_PLANE_FILE, REPLAY_METADATA_FILE
from rollsync.shell.store import Chosen, SnapshotStore, StoreError
from tests.shell.store.kit import (
    STATE,
    WEIGHTS,
    chosen_save,
    facts,
    save_checkpoint,
    save_snapshot,
    state_of,
    store_at,
)

ANCHOR = Path("bootstrap", "anchor.bin")


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Checkpoint 1, snapshots 2 and 3 under it; 3 has segments of its own and shared ones. (The
    state of 3 is a chain that the one of 2 does not begin, so that each link counts.)"""
    root = tmp_path / "run"
    store = store_at(root)
    save_checkpoint(store, 1, 1, b"rows a")
    save_snapshot(store, 1, 2, b"rows a", b"rows b", chain=(b"base 2",))
    save_snapshot(store, 1, 3, b"rows b", b"rows c", chain=(b"base 3", b"link", b"newest"))
    return root


def snapshot(root: Path, number: int) -> Path:
    return root / "step_000001" / "snapshots" / f"{number:06d}"


def own_files(root: Path) -> list[Path]:
    """Files that snapshot 3 needs and snapshot 2 does not."""
    files = [path for path in snapshot(root, 2).rglob("*") if path.is_file()]
    store = store_at(root)
    store.choose()
    bundle = store.choose().bundle
    assert bundle is not None
    names = (*bundle.facts.state_segments, bundle.facts.segments[-1])
    return [*files, *(root / "segments" / name for name in names)]


def damages(path: Path) -> Iterator[tuple[str, bytes]]:
    """Every single-bit flip, every truncation, and a byte more."""
    whole = path.read_bytes()
    for index in range(len(whole)):
        for bit in range(8):
            flipped = bytes([whole[index] ^ 1 << bit])
            yield f"bit {bit} of byte {index}", whole[:index] + flipped + whole[index + 1 :]
        yield f"cut at {index}", whole[:index]
    yield "a byte more", whole + b"\0"


def overwrite(path: Path, data: bytes) -> None:
    """In place: some file systems write at once what replaces a file, and thousands of times take
    a while."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def test_every_flipped_bit_and_every_truncation_is_noticed(run_directory: Path) -> None:
    store = store_at(run_directory)
    count = 0
    for path in own_files(run_directory):
        whole = path.read_bytes()
        for what, data in damages(path):
            overwrite(path, data)
            chosen = store.choose()
            assert save_of(chosen) == 2, (path, what)
            assert [each.path for each in chosen.refused] == [str(snapshot(run_directory, 2))]
            assert path.name in chosen.refused[0].why, (what, chosen.refused[0].why)
            count += 1
        overwrite(path, whole)
    assert save_of(store.choose()) == 3
    assert count > 3000
    print(f"{count} damaged snapshots, all noticed")


def test_every_damage_to_the_weights_is_noticed(run_directory: Path) -> None:
    before = store_at(run_directory)
    save_snapshot(before, 0, 9)
    store = store_at(run_directory)
    weights = run_directory / "step_000001" / "trainer" / WEIGHTS
    for what, data in list(damages(weights)):
        weights.write_bytes(data)
        chosen = store.choose()
        # No snapshot of step 1 can be resumed without them.
        assert save_of(chosen) == 9, what
        assert len(chosen.refused) == 3
        assert all(WEIGHTS in each.why for each in chosen.refused)


def test_rows_that_only_the_checkpoint_needs_are_no_matter_of_its_snapshots(tmp_path: Path) -> None:
    root = tmp_path / "run"
    store = store_at(root)
    save_snapshot(store, 0, 1)
    save_checkpoint(store, 1, 2, b"rows a")
    (rows,) = (root / "segments").iterdir()
    save_snapshot(store, 1, 3, b"rows b")
    rows.unlink()
    again = store_at(root)
    chosen = again.choose()
    assert (save_of(chosen), chosen.refused) == (3, ())
    assert again.has_anchor(1)
    assert again.prune() == ()
    shutil.rmtree(snapshot(root, 1))
    chosen = store_at(root).choose()
    assert save_of(chosen) == 1
    assert rows.stem in chosen.refused[0].why


@pytest.mark.parametrize("name", [STATE, "environment/episodes"])
def test_rollout_state_of_the_checkpoint_is_no_matter_of_its_snapshots(
    name: str, tmp_path: Path
) -> None:
    """A snapshot has rollout state of its own: it needs the checkpoint's weights."""
    root = tmp_path / "run"
    store = store_at(root)
    save_snapshot(store, 0, 1)
    draft = store.begin(CheckpointKind.TRAINER_CHECKPOINT, 1)
    (draft.path / "environment").mkdir()
    (draft.path / "environment" / "episodes").write_bytes(b"turns")
    checkpoint = draft.publish(facts(CheckpointKind.TRAINER_CHECKPOINT, 1), {STATE: state_of(2)})
    save_snapshot(store, 1, 3)
    whole = (checkpoint / name).read_bytes()
    for _, data in damages(checkpoint / name):
        (checkpoint / name).write_bytes(data)
        again = store_at(root)
        chosen = again.choose()
        assert (save_of(chosen), chosen.refused) == (3, ())
        assert again.has_anchor(1)
        assert again.prune() == ()
        again.close()
    (checkpoint / name).write_bytes(whole)
    (checkpoint / MANIFEST_FILE).unlink()
    chosen = store_at(root).choose()
    assert save_of(chosen) == 1
    assert len(chosen.refused) == 2


def test_the_names_of_rollout_state_are_those_that_are_written() -> None:
    assert all(map(is_of_rollout, (STATE_FILE, REPLAY_METADATA_FILE, DATA_PLANE_FILE)))
    assert is_of_rollout(f"{ENVIRONMENT_DIRECTORY}/worker-0/episodes")
    assert not any(map(is_of_rollout, ("policy/model.safetensors", "trainer.json", "environments")))


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_directory_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def link_to_a_copy(path: Path) -> None:
    path.rename(path.with_name("copy"))
    path.symlink_to(path.with_name("copy"))


REMOVALS = (delete, empty, make_directory_of, link_to_nothing, link_to_a_copy)


@pytest.mark.parametrize("how", REMOVALS)
def test_a_file_that_is_no_longer_there_is_noticed(
    run_directory: Path, how: Callable[[Path], None]
) -> None:
    for index, path in enumerate(own_files(run_directory)):
        root = run_directory.with_name(f"copy{index}")
        shutil.copytree(run_directory, root)
        how(root / path.relative_to(run_directory))
        chosen = store_at(root).choose()
        assert save_of(chosen) == 2
        assert path.name in chosen.refused[0].why


def test_files_that_changed_places_are_noticed(run_directory: Path) -> None:
    newest, before = snapshot(run_directory, 2), snapshot(run_directory, 1)
    for name in (MANIFEST_FILE, STATE):
        swap(newest / name, before / name)
        chosen = store_at(run_directory).choose()
        assert save_of(chosen) == 1
        assert [Path(each.path) for each in chosen.refused] == [newest, before]
        swap(newest / name, before / name)
    segments = sorted((run_directory / "segments").iterdir())
    swap(segments[0], segments[1])
    with pytest.raises(StoreError, match="none of 3 bundles"):
        store_at(run_directory).choose()
    swap(segments[0], segments[1])
    assert chosen_save(store_at(run_directory)) == 3


def test_a_checkpoint_under_the_name_of_another_step_is_refused(run_directory: Path) -> None:
    (run_directory / "step_000001").rename(run_directory / "step_000002")
    with pytest.raises(StoreError, match="its manifest is of step 1, not of step 2"):
        store_at(run_directory).choose()


def test_a_snapshot_is_not_taken_for_a_checkpoint(run_directory: Path) -> None:
    shutil.copytree(snapshot(run_directory, 2), run_directory / "step_000002")
    chosen = store_at(run_directory).choose()
    assert save_of(chosen) == 3
    assert "of a rollout_snapshot, not of a trainer_checkpoint" in chosen.refused[0].why


def test_when_nothing_is_left_every_reason_is_given(run_directory: Path) -> None:
    for path in (run_directory / "segments").iterdir():
        path.unlink()
    with pytest.raises(StoreError) as raised:
        store_at(run_directory).choose()
    text = str(raised.value)
    assert "none of 3 bundles can be resumed from" in text
    for place in ("000002: segment", "000001: segment", "step_000001: segment"):
        assert place in text


def test_what_changes_after_the_choice_is_noticed_when_it_is_read(run_directory: Path) -> None:
    bundle = store_at(run_directory).choose().bundle
    assert bundle is not None
    (bundle.path / STATE).write_bytes(b"state 4")
    (run_directory / "segments" / bundle.facts.segments[0]).unlink()
    with pytest.raises(StoreError, match="not what was verified"):
        bundle.read(STATE)
    with pytest.raises(StoreError, match="No such file"):
        bundle.read_segment(bundle.facts.segments[0])
    with pytest.raises(StoreError, match="no file of the bundle"):
        bundle.read("other")
    with pytest.raises(StoreError, match="lists no segment"):
        bundle.read_segment("0" * 64)


def save_of(chosen: Chosen) -> int:
    assert chosen.bundle is not None
    return chosen.bundle.facts.mutation_version


def swap(left: Path, right: Path) -> None:
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)


def test_a_store_that_was_made_before_the_damage_notices_it_too(run_directory: Path) -> None:
    store: SnapshotStore = store_at(run_directory)
    assert save_of(store.choose()) == 3
    (snapshot(run_directory, 2) / STATE).write_bytes(b"state 4")
    assert save_of(store.choose()) == 2


# What an attacker might leave.


def test_a_manifest_that_names_files_elsewhere_reads_nothing_there(
    run_directory: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    path = snapshot(run_directory, 2) / MANIFEST_FILE
    manifest = decode(path.read_bytes(), RolloutSnapshotManifest).unwrap()
    for name in ("../../../../secret", str(secret)):
        file = SnapshotFile(name=name, size_bytes=6, digest=hashlib.sha256(b"secret").hexdigest())
        path.write_bytes(encode(replace(manifest, files=(file,))))
        chosen = store_at(run_directory).choose()
        assert save_of(chosen) == 2
        assert "no plain relative path" in chosen.refused[0].why


def test_a_huge_manifest_is_not_read(run_directory: Path) -> None:
    for path in (snapshot(run_directory, 2) / MANIFEST_FILE, run_directory / ANCHOR):
        with path.open("r+b") as file:
            file.truncate(2**40)  # Sparse: it takes no room.
        tracemalloc.start()
        chosen = store_at(run_directory).choose()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert save_of(chosen) == 2
        assert peak < 2**24
        assert "more than" in chosen.refused[0].why
