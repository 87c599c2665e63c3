"""A run is killed with SIGKILL at any moment and resumed: every prompt is accounted for."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.sampler import (
    BuiltInSampler,
    InOrderSampler,
    ReadyFirstSampler,
    WeightFifoSampler,
    WindowedSampler,
)
from tests.shell.run.child import COMMIT, Moment, Order
from tests.shell.run.runs import (
    KILLED,
    STEPS,
    Children,
    closed_account,
    entries_of,
    run_to_the_end,
    small_config,
    weights_of,
    write_file,
)

SAMPLERS: list[BuiltInSampler] = [
    InOrderSampler(),
    WindowedSampler(),
    ReadyFirstSampler(),
    WeightFifoSampler(),
]
KINDS = ("Resumed", "WeightsSynced", "StepClaimed", COMMIT, "StepTrained", "Saved", "Finished")


def kill_somewhere(children: Children, config: MasterConfig, rng: random.Random) -> bool:
    """Start and kill, by chance at a moment of the journal or of the clock; whether it died."""
    file = write_file(config)
    if rng.random() < 0.5:
        kind = rng.choice(KINDS)
        once = kind in ("Resumed", "Finished")
        moment = Moment(kind=kind, count=1 if once else rng.randint(1, 3))
        return children.run(Order(config=file, moment=moment)) == KILLED
    return children.run(Order(config=file, kill_after_s=0.1 + rng.random() * 0.8)) == KILLED


@pytest.mark.parametrize("kind", KINDS)
def test_killed_after_an_entry_of_each_kind(
    kind: str, children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    order = Order(config=write_file(config), moment=Moment(kind=kind))
    assert children.run(order) == KILLED
    run_to_the_end(children, config)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_killed_by_chance(
    sampler: BuiltInSampler, children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = replace(small_config(tmp_path / "run", model_path), sampler=sampler)
    rng = random.Random(type(sampler).__name__)
    assert sum(kill_somewhere(children, config, rng) for _ in range(3)) > 0
    run_to_the_end(children, config)


def test_a_finished_run_that_is_started_again_changes_nothing(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    run_to_the_end(children, config)
    state, _ = closed_account(config)
    run_to_the_end(children, config)
    again, audit = closed_account(config)
    assert again == state
    assert audit.thrown_away_steps == 0
    kinds = Counter(type(entry).__name__ for entry in entries_of(config))
    assert kinds["StepTrained"] == STEPS
    assert kinds["Finished"] == 2


def test_a_deterministic_run_has_the_same_weights_however_often_it_is_killed(
    children: Children, tmp_path: Path, model_path: Path
) -> None:
    def deterministic(name: str) -> MasterConfig:
        config = small_config(tmp_path / name, model_path)
        return replace(
            config,
            run=replace(config.run, deterministic=True),
            # Enough siblings that some are right and some are wrong: else nothing is learnt.
            grpo=replace(config.grpo, num_generations_per_prompt=6),
            sampler=InOrderSampler(max_lookahead_versions=0),
        )

    untouched, killed = deterministic("untouched"), deterministic("killed")
    run_to_the_end(children, untouched)
    file = write_file(killed)
    for moment in (
        Moment(kind="StepClaimed", count=2),
        Moment(kind="StepTrained", count=2),
        Moment(kind="Saved", count=3),
    ):
        assert children.run(Order(config=file, moment=moment)) == KILLED
    run_to_the_end(children, killed)
    assert weights_of(killed) == weights_of(untouched)
    assert weights_of(untouched) != (model_path / "model.safetensors").read_bytes()


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "kills",
    [pytest.param(15, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda each: type(each).__name__)
def test_killed_by_chance_over_and_over(
    sampler: BuiltInSampler, kills: int, children: Children, tmp_path: Path, model_path: Path
) -> None:
    began_s, killed, runs = time.monotonic(), 0, 0
    rng = random.Random(kills)
    while killed < kills:
        config = replace(small_config(tmp_path / f"run{runs}", model_path), sampler=sampler)
        killed += sum(kill_somewhere(children, config, rng) for _ in range(rng.randint(1, 12)))
        assert run_to_the_end(children, config).progress.train_steps == STEPS
        runs += 1
    print(f"{killed} kills in {runs} runs, {time.monotonic() - began_s:.0f} s")
    assert killed >= kills
