"""A whole run whose rows are in TransferQueue: trained, saved, killed, resumed, accounted for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from rollsync.pure.config import TransferQueuePlaneConfig
from rollsync.shell.journal import JournalEntry, Saved, StepTrained
from tests.shell.run.commands import kill_when, run
from tests.shell.run.runs import (
    all_prompts,
    check_steps_count_on,
    closed_account,
    ended_prompts,
    entries_of,
    small_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def saved_between_two_steps(entries: list[JournalEntry]) -> bool:
    """A step is trained, and a snapshot has been saved since."""
    trained = [i for i, entry in enumerate(entries) if isinstance(entry, StepTrained)]
    saved = [i for i, e in enumerate(entries) if isinstance(e, Saved) and e.saved]
    return bool(trained and saved and saved[-1] > trained[0])


@pytest.mark.parametrize("storage", ["simple", "ray"])
def test_a_run_over_it_is_killed_and_resumed(
    storage: Literal["simple", "ray"], tmp_path: Path, model_path: Path
) -> None:
    config = replace(
        small_config(tmp_path / "run", model_path),
        data_plane=TransferQueuePlaneConfig(storage=storage),
    )
    kill_when(config, saved_between_two_steps)
    code, said = run(config)
    assert code == 0, said
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts()
    check_steps_count_on(entries_of(config))
    kinds = Counter(type(entry).__name__ for entry in entries_of(config))
    assert kinds["Resumed"] == 2


def test_a_run_changes_its_data_plane_between_two_lives(tmp_path: Path, model_path: Path) -> None:
    """What is saved does not depend on where the rows were."""
    config = small_config(tmp_path / "run", model_path)
    kill_when(config, saved_between_two_steps)
    moved = replace(config, data_plane=TransferQueuePlaneConfig(storage_units=1))
    code, said = run(moved)
    assert code == 0, said
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts()
