"""What `rollsync run` does before anything runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.config import dataset_digest
from rollsync.pure.snapshot.places import LOCK_FILE
from rollsync.shell.config import ConfigError
from rollsync.shell.run.launch import run_config
from rollsync.shell.run.model_digest import model_digest, with_model_digest
from rollsync.shell.run.saved import read_saved
from rollsync.shell.store import SnapshotStore, StoreError
from tests.shell.run.test_released import RELEASED, copied
from tests.shell.store.kit import save_snapshot

LOCKING = """
import sys
from pathlib import Path
from rollsync.shell.store import RealFileSystem
lock = RealFileSystem().lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_second_run_on_a_live_directory_changes_nothing(tmp_path: Path) -> None:
    config = copied(RELEASED[0], tmp_path)
    directory = Path(config.run.directory)
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKING, directory / LOCK_FILE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        before = contents(directory)
        with pytest.raises(StoreError, match="another process writes to"):
            run_config(replace(config, buffer_capacity=77))
        assert contents(directory) == before
        holder.kill()


def test_another_run_on_the_directory_changes_nothing(tmp_path: Path) -> None:
    config = copied(RELEASED[0], tmp_path)
    directory = Path(config.run.directory)
    (directory / LOCK_FILE).touch()
    before = contents(directory)
    with pytest.raises(StoreError, match=r"run\.seed was"):
        run_config(replace(config, run=replace(config.run, seed=77)))
    assert contents(directory) == before


def test_a_model_is_its_files_wherever_they_are(tmp_path: Path) -> None:
    model = RELEASED[0] / "model"
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / ".cache").mkdir()
    assert model_digest(copy) == model_digest(model)
    (copy / "config.json").rename(copy / "config2.json")
    assert model_digest(copy) != model_digest(model)
    (copy / "config2.json").rename(copy / "config.json")
    with (copy / "config.json").open("ab") as file:
        file.write(b" ")
    assert model_digest(copy) != model_digest(model)


def test_a_model_that_is_not_the_one_wanted_is_refused(tmp_path: Path) -> None:
    config = copied(RELEASED[0], tmp_path)
    noted = with_model_digest(config)
    assert noted.model.digest == model_digest(Path(config.model.path))
    assert with_model_digest(noted) == noted
    other = replace(config, model=replace(config.model, digest="0" * 64))
    with pytest.raises(ConfigError, match=r"model\.digest is 0+, the files in"):
        with_model_digest(other)
    nowhere = replace(config, model=replace(config.model, path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"model\.path: .*nowhere: No such file"):
        run_config(nowhere)


def test_a_run_of_before_is_known_by_the_path_of_its_model(tmp_path: Path) -> None:
    """Its anchor has no digest, and what is saved from now on has its fingerprint."""
    config = with_model_digest(copied(RELEASED[0], tmp_path))
    directory = Path(config.run.directory)
    step = read_saved(directory).bundle.facts.base_train_step

    def store() -> SnapshotStore:
        return SnapshotStore(directory, config=config, dataset_digest=dataset_digest(config.data))

    saving = store()
    saving.claim()
    saved = save_snapshot(saving, step, 1)
    saving.close()
    chosen = store().choose()
    assert chosen.bundle is not None
    assert (chosen.bundle.path, chosen.refused) == (saved, ())
