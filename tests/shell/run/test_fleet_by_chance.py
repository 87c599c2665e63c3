"""A run of a few hundred steps whose engines and controller are killed by chance, all the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from msgspec.structs import replace

from rollsync.pure.refit.fleet.state import EnginePhase
from rollsync.pure.rollout.sampler import BuiltInSampler, InOrderSampler, WindowedSampler
from rollsync.shell.journal import EngineChanged, Resumed, StepTrained
from rollsync.shell.rollout.errors import WorkersLost
from tests.shell.run.fleet_child import ENOUGH
from tests.shell.run.fleet_runs import endless_config
from tests.shell.run.runs import (
    KILLED,
    ROOT,
    check_steps_count_on,
    closed_account,
    entries_of,
    write_file,
)

STEPS = 300
MOST_STARTS = 12


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "sampler", [InOrderSampler(), WindowedSampler()], ids=lambda each: type(each).__name__
)
def test_every_prompt_is_accounted_for_whoever_is_killed(
    sampler: BuiltInSampler, cluster: None, tmp_path: Path, model_path: Path
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    config = replace(endless_config(tmp_path / "run", model_path, engines=3), sampler=sampler)
    address = ray.get_runtime_context().gcs_address
    config = replace(config, cluster=replace(config.cluster, address=address))
    file = write_file(config)
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        assert len(codes) < MOST_STARTS, codes
        child = subprocess.run(
            [
                *(sys.executable, "-m", "tests.shell.run.fleet_child"),
                *(file, str(orders), str(STEPS), str(len(codes))),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        codes.append(child.returncode)
        assert child.returncode in (0, KILLED, WorkersLost.exit_code), child.stderr[-4000:]
    closed_account(config)
    entries = entries_of(config)
    check_steps_count_on(entries)
    assert max(entry.step for entry in entries if isinstance(entry, StepTrained)) >= STEPS
    assert sum(isinstance(entry, Resumed) for entry in entries) == len(codes)
    deaths = [
        entry
        for entry in entries
        if isinstance(entry, EngineChanged) and entry.now == EnginePhase.DEAD
    ]
    assert len(deaths) >= ENOUGH
    print(f"{len(deaths)} engines killed, the processes ended with {codes}")
