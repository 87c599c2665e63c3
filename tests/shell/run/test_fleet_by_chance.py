"""A run of hundreds of steps in which everything is killed by chance: engines all the time, and the
controller, the trainer and the data plane's processes each at some moment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import ray
from msgspec.structs import replace

from rollsync.pure.config import DataPlaneConfig, InProcessPlaneConfig, TransferQueuePlaneConfig
from rollsync.pure.refit.fleet.state import EnginePhase
from rollsync.pure.rollout.sampler import BuiltInSampler, InOrderSampler, WindowedSampler
from rollsync.shell.journal import EngineChanged, Resumed, StepTrained
from rollsync.shell.rollout.clients import TrainerLost
from rollsync.shell.rollout.errors import DataPlaneLost, WorkersLost
from tests.shell.run.fleet_child import ENOUGH, Doom, Life
from tests.shell.run.fleet_runs import endless_config
from tests.shell.run.runs import (
    KILLED,
    ROOT,
    check_steps_count_on,
    closed_account,
    entries_of,
    write_file,
)

STEPS, LONG_STEPS = 200, 1000
LATEST_STEP = 40
"""Of a process that is killed, or of which somebody is."""
QUEUE = TransferQueuePlaneConfig(storage_units=2, deadline_s=600.0)
OBJECTS = TransferQueuePlaneConfig(storage="ray", deadline_s=600.0)
IN_PROCESS = InProcessPlaneConfig()

SAYS = {
    Doom.TRAINER: TrainerLost,
    Doom.QUEUE_STORAGE: DataPlaneLost,
    Doom.QUEUE_CONTROLLER: DataPlaneLost,
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sampler", "plane"),
    [
        pytest.param(InOrderSampler(), QUEUE, id="in order, TransferQueue", marks=pytest.mark.slow),
        pytest.param(
            WindowedSampler(), IN_PROCESS, id="windowed, in process", marks=pytest.mark.soak
        ),
    ],
)
def test_every_prompt_is_accounted_for_whoever_is_killed(
    sampler: BuiltInSampler,
    plane: DataPlaneConfig,
    cluster: None,
    tmp_path: Path,
    model_path: Path,
) -> None:
    check_whoever_is_killed(sampler, plane, tmp_path, model_path, steps=STEPS, times=1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("plane", [QUEUE, OBJECTS], ids=["simple", "ray"])
@pytest.mark.parametrize(
    "sampler", [InOrderSampler(), WindowedSampler()], ids=lambda each: type(each).__name__
)
def test_every_prompt_is_accounted_for_whoever_is_killed_for_long(
    sampler: BuiltInSampler,
    plane: DataPlaneConfig,
    cluster: None,
    tmp_path: Path,
    model_path: Path,
) -> None:
    check_whoever_is_killed(sampler, plane, tmp_path, model_path, steps=LONG_STEPS, times=4)


def check_whoever_is_killed(
    sampler: BuiltInSampler,
    plane: DataPlaneConfig,
    tmp_path: Path,
    model_path: Path,
    *,
    steps: int,
    times: int,
) -> None:
    """Run on and on. Everything there is is killed that many times, and the engines more often."""
    orders = tmp_path / "orders"
    orders.mkdir()
    config = endless_config(tmp_path / "run", model_path, engines=3)
    config = replace(
        config,
        sampler=sampler,
        data_plane=plane,
        cluster=replace(config.cluster, address=ray.get_runtime_context().gcs_address),
    )
    dooms = [Doom.CONTROLLER, Doom.TRAINER]
    if isinstance(plane, TransferQueuePlaneConfig):
        dooms += [Doom.QUEUE_STORAGE, Doom.QUEUE_CONTROLLER]
    rng = random.Random(type(sampler).__name__)
    lives = dooms * times
    rng.shuffle(lives)
    for seed, doom in enumerate([*lives, None]):
        life = Life(
            config=write_file(config),
            orders=str(orders),
            last_step=steps,
            seed=seed,
            doom=doom,
            # The first one while the run starts.
            doom_step=rng.randint(1, LATEST_STEP) if seed else 0,
            doom_delay_s=rng.uniform(0, 1),
        )
        check_life(life)
    closed_account(config)
    entries = entries_of(config)
    check_steps_count_on(entries)
    assert max(entry.step for entry in entries if isinstance(entry, StepTrained)) >= steps
    # All but the first, and the one that nobody ended.
    assert sum(isinstance(entry, Resumed) for entry in entries) >= len(lives)
    deaths = [
        entry
        for entry in entries
        if isinstance(entry, EngineChanged) and entry.now == EnginePhase.DEAD
    ]
    assert len(deaths) >= ENOUGH


def check_life(life: Life) -> None:
    """Have a process carry the run on; it ends as it has to after what was killed."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.shell.run.fleet_child", msgspec.json.encode(life).decode()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    said = child.stderr[-4000:]
    match life.doom:
        case None:
            assert child.returncode == 0, said
        case Doom.CONTROLLER:
            assert child.returncode == KILLED, said
        case other:
            assert child.returncode == WorkersLost.exit_code, said
            assert f"{SAYS[other].__name__}: " in said
