"""Runs with policy workers that are halted, or killed with SIGKILL and started again."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import cast

import psutil
import pytest
import ray
from msgspec.structs import replace
from ray.actor import ActorProxy

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.sampler import InOrderSampler
from rollsync.shell.grpo.worker import GrpoPolicyWorker
from rollsync.shell.journal import Finished, JournalEntry, StepClaimed, StepTrained
from rollsync.shell.rollout.clients import TrainerLost
from rollsync.shell.rollout.controller import RunOutcome
from rollsync.shell.rollout.data_plane import InProcessDataPlane
from rollsync.shell.run.launch import carry_on, opened_run
from tests.shell.run.fleet_runs import PATIENT, run_here, run_until
from tests.shell.run.halted_worker import HaltedWorker
from tests.shell.run.killable import COMMITTING, GRADIENTS, SAVING, SENDING, of_rank, order
from tests.shell.run.runs import (
    all_prompts,
    check_steps_count_on,
    closed_account,
    ended_prompts,
    entries_of,
    small_config,
    weights_of,
)


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    path = tmp_path / "orders"
    path.mkdir()
    return path


def two_workers(directory: Path, model: Path, *, engines: int) -> MasterConfig:
    """A run whose bits depend on nothing but its configuration."""
    config = small_config(directory, model)
    return replace(
        config,
        run=replace(config.run, deterministic=True),
        sampler=InOrderSampler(max_lookahead_versions=0),
        grpo=replace(config.grpo, data_parallel_size=2),
        generation=replace(config.generation, engines=engines, fleet=PATIENT),
    )


def never(_: JournalEntry) -> bool:
    return False


def kill_after_step(step: int, orders: Path, moment: str, rank: int, config: MasterConfig) -> None:
    """Run until a policy worker is killed after a step, which has to end the run by its name."""

    def direct(entry: JournalEntry) -> bool:
        if isinstance(entry, StepTrained) and entry.step == step:
            order(orders, of_rank(moment, rank))
        return False

    with pytest.raises(TrainerLost, match=f"policy worker {rank} is gone") as lost:
        run_here(config, orders, direct)
    assert lost.value.exit_code == 3
    assert not list(orders.iterdir())
    ended = entries_of(config)[-1]
    assert isinstance(ended, Finished)
    assert f"policy worker {rank} is gone" in ended.why


def run_to_the_end(config: MasterConfig, orders: Path) -> list[str]:
    """The prompts that the run ended with, every one accounted for."""
    run_here(config, orders, never)
    state, _ = closed_account(config)
    check_steps_count_on(entries_of(config))
    return ended_prompts(state)


@pytest.mark.timeout(300)
def test_a_workers_death_stops_the_run_by_its_rank_and_the_next_start_resumes(
    cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    config = two_workers(tmp_path / "run", model_path, engines=1)
    kill_after_step(2, orders, GRADIENTS, 1, config)
    assert run_to_the_end(config, orders) == all_prompts()


def test_a_stop_during_the_start_ends_workers_that_are_halted(
    cluster: None, tmp_path: Path, model_path: Path
) -> None:
    config = small_config(tmp_path / "run", model_path)
    remote = ray.remote(HaltedWorker).options(num_cpus=0)
    files = [tmp_path / "policy", tmp_path / "engine"]

    async def begin() -> RunOutcome:
        stop = asyncio.Event()
        policy = cast("ActorProxy[GrpoPolicyWorker]", remote.remote(files[0]))
        running = asyncio.create_task(
            carry_on(
                run,
                plane=InProcessDataPlane(),
                policy=[policy],
                start_engine=lambda slot: remote.remote(files[1]),
                stop=stop,
                at_once=asyncio.Event(),
            )
        )
        while not all(file.exists() for file in files):
            await asyncio.sleep(0.01)
        stop.set()
        return await running

    with opened_run(config) as run:
        outcome = asyncio.run(begin())
    assert (outcome.completed, outcome.saved) == (False, True)
    assert outcome.why.startswith("asked to stop during the start")
    for file in files:
        while psutil.pid_exists(int(file.read_text())):
            signal.sigtimedwait((), 0.05)
    assert not list(Path(config.run.directory).glob("step_*"))
    assert not any(isinstance(entry, Finished) for entry in entries_of(config))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_second_stop_ends_a_run_whose_worker_is_halted_in_a_step(
    cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    """There is no checkpoint to save anything under, so the first one waits for the step."""
    config = small_config(tmp_path / "run", model_path)
    every = replace(config.checkpointing, trainer_every_steps=100)
    config = replace(config, checkpointing=every)
    stop, at_once = asyncio.Event(), asyncio.Event()

    def direct(entry: JournalEntry) -> None:
        if isinstance(entry, StepTrained) and entry.step == 1:
            order(orders, GRADIENTS, signal.SIGSTOP)
        if isinstance(entry, StepClaimed) and entry.step == 2:
            stop.set()
            asyncio.get_running_loop().call_later(0.5, at_once.set)

    outcome = run_until(config, orders, direct, stop=stop, at_once=at_once)
    assert (outcome.completed, outcome.saved) == (False, False)
    assert "a second time" in outcome.why
    ended = entries_of(config)[-1]
    assert isinstance(ended, Finished)
    assert (ended.train_steps, ended.why) == (1, outcome.why)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_workers_were_killed_ends_with_the_same_bits(
    cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    killed = two_workers(tmp_path / "killed", model_path, engines=3)
    kill_after_step(1, orders, GRADIENTS, 1, killed)
    kill_after_step(3, orders, SENDING, 0, killed)
    assert run_to_the_end(killed, orders) == all_prompts()
    whole = two_workers(tmp_path / "whole", model_path, engines=1)
    assert run_to_the_end(whole, orders) == all_prompts()
    assert weights_of(killed) == weights_of(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_worker_can_be_killed_at_any_moment(
    cluster: None, tmp_path: Path, model_path: Path, orders: Path
) -> None:
    """The second worker feeds nobody. The last start has one worker only."""
    config = two_workers(tmp_path / "run", model_path, engines=1)
    kill_after_step(1, orders, GRADIENTS, 0, config)
    kill_after_step(2, orders, COMMITTING, 1, config)
    kill_after_step(3, orders, SENDING, 1, config)
    kill_after_step(4, orders, SAVING, 0, config)
    assert (
        run_to_the_end(replace(config, grpo=replace(config.grpo, data_parallel_size=1)), orders)
        == all_prompts()
    )
