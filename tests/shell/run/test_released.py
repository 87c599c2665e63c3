"""Run directories that released versions have written go on under today's code.

`tests/golden/run-VERSION/` is what a run of that version left when it was killed: a trainer
checkpoint, a snapshot under it with ready, sealed and running attempts, the journal, and the model
that the run started from. They are never written again. A file that is renamed or written another
way in a later version has to be found here under its old name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.state import RolloutAttemptStatus
from rollsync.shell.config import read_config
from rollsync.shell.journal import Resumed
from rollsync.shell.run.saved import CONFIG, read_saved
from rollsync.shell.store import RealFileSystem, examine
from tests.shell.run.runs import ROOT, STEPS, Children, closed_account, entries_of, run_to_the_end

RELEASED = sorted((ROOT / "tests" / "golden").glob("run-*"))


def copied(released: Path, tmp_path: Path) -> MasterConfig:
    """The run's configuration, with a copy of its directory as the run directory.

    The model keeps its path, which is relative to the root of the repository.
    """
    directory = tmp_path / "run"
    shutil.copytree(released / "run", directory)
    config = read_config(directory / CONFIG)
    return replace(config, run=replace(config.run, directory=str(directory)))


def test_there_is_one_of_the_first_release() -> None:
    assert "run-0.1.0" in [path.name for path in RELEASED]


@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.name)
def test_it_holds_work_of_every_kind(released: Path, tmp_path: Path) -> None:
    """Else resuming it would show little."""
    saved = read_saved(Path(copied(released, tmp_path).run.directory))
    assert saved.bundle.path.parent.name == "snapshots"
    assert saved.bundle.trainer_path is not None
    assert saved.state.replay
    attempts = [
        attempt.status
        for record in saved.state.ledger.groups.values()
        for sibling in record.siblings
        for attempt in sibling.attempts
    ]
    assert {RolloutAttemptStatus.SEALED, RolloutAttemptStatus.DISPATCHED} <= set(attempts)


@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.name)
def test_it_verifies_and_goes_on_from_its_newest_snapshot(
    released: Path, tmp_path: Path, children: Children
) -> None:
    config = copied(released, tmp_path)
    directory = Path(config.run.directory)
    report = examine(directory, RealFileSystem())
    assert report.is_whole
    assert report.notes == ()
    run_to_the_end(children, config)
    resumed = [entry for entry in entries_of(config) if isinstance(entry, Resumed)]
    assert resumed[-1].source == report.bundles[0].path
    assert resumed[-1].refused == ()
    state, audit = closed_account(config)
    assert state.progress.train_steps == STEPS
    assert audit.trained_once == 2 * STEPS
