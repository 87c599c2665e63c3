"""Saving into a run directory and choosing from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollsync.shell.store import StoreError
from tests.shell.store.kit import (
    STATE,
    chosen_save,
    config,
    names,
    save_checkpoint,
    save_snapshot,
    state_of,
    store_at,
)


def test_a_new_directory_is_a_fresh_run(tmp_path: Path) -> None:
    assert store_at(tmp_path / "run").choose().bundle is None
    assert not (tmp_path / "run").exists()


def test_the_newest_save_is_chosen_with_its_files_rows_and_weights(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    assert store.has_anchor(0)
    assert not store.has_anchor(1)
    save_snapshot(store, 0, 1, b"rows a")
    save_checkpoint(store, 1, 2, b"rows a", b"rows b")
    path = save_snapshot(store, 1, 3, b"rows b", b"rows c")
    assert store.has_anchor(1)
    assert path == tmp_path / "step_000001" / "snapshots" / "000001"

    bundle = store_at(tmp_path).choose().bundle
    assert bundle is not None
    assert bundle.path == path
    assert bundle.facts.mutation_version == 3
    assert bundle.trainer_path == tmp_path / "step_000001"
    rows = [bundle.read_segment(name) for name in bundle.facts.segments]
    assert rows == [b"rows b", b"rows c"]
    assert chosen_save(store_at(tmp_path)) == 3


def test_only_what_a_bundle_lists_is_read_through_it(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    save_snapshot(store, 0, 1, b"rows of the first")
    path = save_snapshot(store, 0, 2, b"rows")
    (other,) = (
        name
        for name in names(tmp_path / "segments")
        if (tmp_path / "segments" / name).read_bytes() == b"rows of the first"
    )
    (path / "notes").write_bytes(b"mine")
    bundle = store_at(tmp_path).choose().bundle
    assert bundle is not None
    with pytest.raises(StoreError, match=f"it lists no segment {other}"):
        bundle.read_segment(other)
    with pytest.raises(StoreError, match="no file of the bundle"):
        bundle.read("notes")


def test_what_changed_since_it_was_verified_is_not_read(tmp_path: Path) -> None:
    path = save_snapshot(store_at(tmp_path), 0, 1, b"rows")
    bundle = store_at(tmp_path).choose().bundle
    assert bundle is not None
    (segment,) = bundle.facts.segments
    (path / STATE).write_bytes(state_of(2))
    (tmp_path / "segments" / segment).write_bytes(b"ROWS")
    with pytest.raises(StoreError, match="it is not what was verified"):
        bundle.read(STATE)
    with pytest.raises(StoreError, match="it is not what was verified"):
        bundle.read_segment(segment)
    (path / STATE).unlink()
    with pytest.raises(StoreError, match="No such file"):
        bundle.read(STATE)


def test_another_configuration_or_dataset_is_refused_by_name(tmp_path: Path) -> None:
    save_snapshot(store_at(tmp_path), 0, 1)
    for other in (
        store_at(tmp_path, master_config=config(seed=7)),
        store_at(tmp_path, dataset_digest="d1"),
    ):
        with pytest.raises(StoreError, match=r"run\.seed was 0, is now 7|data\.digest was"):
            other.choose()
        with pytest.raises(StoreError, match="belongs to another run"):
            other.has_anchor(0)
    assert chosen_save(store_at(tmp_path, master_config=config(max_steps=99))) == 1


def test_prune_keeps_what_the_limits_say(tmp_path: Path) -> None:
    store = store_at(tmp_path, trainer_checkpoints=1, snapshots_per_checkpoint=1)
    save_snapshot(store, 0, 1, b"rows a")
    save_checkpoint(store, 1, 2, b"rows b")
    save_snapshot(store, 1, 3, b"rows b")
    save_snapshot(store, 1, 4, b"rows c")
    gone = store.prune()
    assert "step_000001/snapshots/000001" in gone
    assert "bootstrap/snapshots/000001" in gone
    assert len([name for name in gone if name.startswith("segments/")]) == 1
    assert chosen_save(store_at(tmp_path)) == 4
    assert store.prune() == ()
