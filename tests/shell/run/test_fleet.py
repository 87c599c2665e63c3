"""Engines and the trainer are killed with SIGKILL in real runs: who goes on, who stops, and how."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollsync.pure.refit.fleet.state import EnginePhase, FleetSettings
from rollsync.shell.journal import (
    EngineChanged,
    Finished,
    JournalEntry,
    Saved,
    StepTrained,
    WeightsSynced,
)
from rollsync.shell.rollout.clients import EnginesLost, TrainerLost
from tests.shell.run.fleet_runs import PATIENT, endless_config, engine_changes, run_here
from tests.shell.run.killable import (
    COMMITTING,
    FINISHING,
    GENERATING,
    GRADIENTS,
    LOADING,
    SAVING,
    SENDING,
    SETTING_UP,
    UPDATING,
    order,
)
from tests.shell.run.runs import check_steps_count_on, closed_account, entries_of

IDLE = "idle"


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders"
    path.mkdir()
    return path


class KillOneByOne:
    """Has engines killed at one moment after another, each when the last is replaced.

    Args:
        engines: how many the run has.
        moments: of `killable`, or `IDLE`; several at once.
        orders: where the orders go.
    """

    def __init__(self, engines: int, moments: Sequence[Sequence[str]], orders: Path) -> None:
        self._engines = engines
        self._moments: Iterator[Sequence[str]] = iter(moments)
        self._orders = orders
        self._pids: dict[str, int] = {}
        self._serving: set[str] = set()
        self._ordered = 0
        self._steps_left: int | None = None
        self.deaths = 0

    def __call__(self, entry: JournalEntry) -> bool:
        if isinstance(entry, EngineChanged):
            self._saw_engine(entry)
        if isinstance(entry, StepTrained):
            if self._steps_left is not None:
                self._steps_left -= 1
            elif not self._ordered and len(self._serving) == self._engines:
                self._kill_next()
        return self._steps_left == 0

    def _saw_engine(self, entry: EngineChanged) -> None:
        if entry.pid is not None:
            self._pids[entry.engine] = entry.pid
        if entry.now == EnginePhase.HEALTHY:
            self._serving.add(entry.engine)
        elif entry.now == EnginePhase.DEAD:
            self._serving.discard(entry.engine)
            self.deaths += 1
            self._ordered -= 1

    def _kill_next(self) -> None:
        moments = next(self._moments, None)
        if moments is None:
            self._steps_left = 2
            return
        self._ordered = len(moments)
        for moment in moments:
            if moment == IDLE:
                os.kill(self._pids[min(self._serving)], signal.SIGKILL)
            else:
                order(self._orders, moment)


def check_killed_at(
    engines: int,
    moments: Sequence[Sequence[str]],
    tmp_path: Path,
    model_path: Path,
    orders: Path,
) -> list[JournalEntry]:
    config = endless_config(tmp_path / "run", model_path, engines=engines)
    director = KillOneByOne(engines, moments, orders)
    run_here(config, orders, director)
    assert director.deaths == sum(map(len, moments))
    assert not list(orders.iterdir()), "an order was not carried out"
    closed_account(config)
    entries = entries_of(config)
    check_steps_count_on(entries)
    for number in range(engines, engines + director.deaths):
        # A replacement has no weights at first, and serves after it got them.
        assert engine_changes(entries, f"engine-{number}")[:3] == ["joining", "outdated", "healthy"]
    return entries


@pytest.mark.timeout(300)
def test_a_run_outlives_its_engines(
    cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    entries = check_killed_at(2, ((IDLE,), (LOADING,)), tmp_path, model_path, orders)
    synced = [entry.weight_version for entry in entries if isinstance(entry, WeightsSynced)]
    assert synced == sorted(synced)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_its_engines_at_every_moment(
    cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    # A set-up is another engine's death away.
    setting_up = ((IDLE, moment) for moment in SETTING_UP)
    moments = ((GENERATING,), (UPDATING,), (FINISHING,), *setting_up)
    check_killed_at(3, moments, tmp_path, model_path, orders)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", [LOADING, pytest.param(GENERATING, marks=pytest.mark.slow)])
def test_below_the_minimum_the_run_saves_and_stops_and_goes_on_when_started_again(
    moment: str, cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    fleet = FleetSettings(min_healthy=1, probe_interval_s=0.2, probe_timeout_s=60.0)
    config = endless_config(tmp_path / "run", model_path, engines=1, fleet=fleet)

    def kill_after_two_steps(entry: JournalEntry) -> bool:
        if isinstance(entry, StepTrained) and entry.step == 2:
            order(orders, moment)
        return False

    with pytest.raises(EnginesLost, match=r"generation\.fleet\.min_healthy") as lost:
        run_here(config, orders, kill_after_two_steps)
    assert lost.value.exit_code == 3
    entries = entries_of(config)
    last_step = max(entry.step for entry in entries if isinstance(entry, StepTrained))
    ended = entries[-1]
    assert isinstance(ended, Finished)
    assert ended.why == str(lost.value)
    dead = max(i for i, each in enumerate(entries) if isinstance(each, EngineChanged))
    saved = [each for each in entries[dead:] if isinstance(each, Saved)]
    assert any(each.saved and each.train_steps == last_step for each in saved)

    def two_more_steps(entry: JournalEntry) -> bool:
        return isinstance(entry, StepTrained) and entry.step == last_step + 2

    run_here(config, orders, two_more_steps)
    _, audit = closed_account(config)
    assert audit.thrown_away_steps == 0
    check_steps_count_on(entries_of(config))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "moment",
    [
        COMMITTING,
        pytest.param(GRADIENTS, marks=pytest.mark.slow),
        pytest.param(SENDING, marks=pytest.mark.slow),
        pytest.param(SAVING, marks=pytest.mark.slow),
    ],
)
def test_the_trainers_death_stops_the_run_by_name_and_the_next_start_resumes(
    moment: str, cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    config = endless_config(tmp_path / "run", model_path, engines=1, fleet=PATIENT)

    def kill_after_two_steps(entry: JournalEntry) -> bool:
        if isinstance(entry, StepTrained) and entry.step == 2:
            order(orders, moment)
        return False

    with pytest.raises(TrainerLost, match="policy worker 0 is gone") as lost:
        run_here(config, orders, kill_after_two_steps)
    assert lost.value.exit_code == 3
    ended = entries_of(config)[-1]
    assert isinstance(ended, Finished)
    assert "policy worker 0 is gone" in ended.why
    run_here(config, orders, lambda entry: isinstance(entry, StepTrained) and entry.step == 5)
    closed_account(config)
    check_steps_count_on(entries_of(config))
