"""A whole run whose rows are in TransferQueue: trained, saved, killed, resumed, accounted for."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from rollsync.pure.config import TransferQueuePlaneConfig
from rollsync.shell.journal import JournalEntry, Resumed, Saved, StepTrained
from rollsync.shell.rollout.errors import DataPlaneLost
from tests.shell.actor_processes import QUEUE_CONTROLLER, QUEUE_STORAGE, actor_processes
from tests.shell.run.commands import kill_when, run, said_by, start, wait_until
from tests.shell.run.runs import (
    PROMPTS,
    all_prompts,
    check_steps_count_on,
    closed_account,
    ended_prompts,
    entries_of,
    small_config,
)

NEVER_S = 3600.0
PATIENCE_S = 120
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


def test_a_run_whose_queue_dies_says_so_and_is_resumed(tmp_path: Path, model_path: Path) -> None:
    """First an actor that stores rows is killed, then, in the next life, the one that knows where
    they are."""
    prompts = 4 * PROMPTS
    config = small_config(tmp_path / "run", model_path)
    config = replace(
        config,
        data=replace(config.data, size=prompts),
        grpo=replace(config.grpo, max_steps=prompts // config.grpo.num_prompts_per_step),
        data_plane=TransferQueuePlaneConfig(deadline_s=NEVER_S),
    )
    for lives, classes in enumerate((QUEUE_STORAGE, QUEUE_CONTROLLER), 1):
        with start(config) as command:
            wait_until(command, config, partial(trained_in_life, lives))
            os.kill(actor_processes(command.pid, classes)[0], signal.SIGKILL)
            command.wait(timeout=PATIENCE_S)
        said = said_by(config)
        assert command.returncode == DataPlaneLost.exit_code == 3, said
        assert "of TransferQueue died" in said
        assert "the same command goes on from the last save" in said
        closed_account(config)
    code, said = run(config)
    assert code == 0, said
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts(prompts)
    check_steps_count_on(entries_of(config))


def trained_in_life(lives: int, entries: list[JournalEntry]) -> bool:
    """The process of that number has trained two steps."""
    begun = [i for i, entry in enumerate(entries) if isinstance(entry, Resumed)]
    if len(begun) < lives:
        return False
    return sum(isinstance(entry, StepTrained) for entry in entries[begun[-1] :]) >= 2


def test_a_run_changes_its_data_plane_between_two_lives(tmp_path: Path, model_path: Path) -> None:
    """What is saved does not depend on where the rows were."""
    config = small_config(tmp_path / "run", model_path)
    kill_when(config, saved_between_two_steps)
    moved = replace(config, data_plane=TransferQueuePlaneConfig(storage_units=1))
    code, said = run(moved)
    assert code == 0, said
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts()
