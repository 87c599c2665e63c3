"""Whole runs with real actors whose engines and trainer can be killed at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import ray
from msgspec.structs import replace
from ray.actor import ActorProxy

from rollsync.pure.config import GenerationConfig, MasterConfig
from rollsync.pure.refit.fleet.state import FleetSettings
from rollsync.shell.grpo.worker import GrpoPolicyWorker
from rollsync.shell.journal import EngineChanged, JournalEntry, JournalListener
from rollsync.shell.rollout.controller import RunOutcome
from rollsync.shell.run.launch import carry_on, opened_run
from rollsync.shell.run.planes import running_plane
from tests.shell.run.killable import KillableEngine, KillablePolicy
from tests.shell.run.runs import small_config

Director = Callable[[JournalEntry], bool]
"""Told of every entry; answers True when the run is to stop."""

PATIENT = FleetSettings(probe_interval_s=0.2, probe_timeout_s=60.0, max_replacements=1000)


def endless_config(
    directory: Path, model: Path, *, engines: int, fleet: FleetSettings = PATIENT
) -> MasterConfig:
    """A run that goes on until it is told to stop."""
    config = small_config(directory, model)
    generation = GenerationConfig(
        backend="torch", max_new_tokens=4, max_model_len=64, engines=engines, fleet=fleet
    )
    return replace(
        config,
        generation=generation,
        data=replace(config.data, max_epochs=100_000),
        grpo=replace(config.grpo, max_steps=100_000),
        recovery=replace(config.recovery, max_attempts=10),
    )


def run_here(config: MasterConfig, orders: Path, direct: Director) -> RunOutcome:
    """One process's part of a run, in this process, on the Ray cluster that is there."""
    stop = asyncio.Event()

    def listener(entry: JournalEntry) -> None:
        if direct(entry):
            stop.set()

    return run_until(config, orders, listener, stop=stop, at_once=asyncio.Event())


def run_until(
    config: MasterConfig,
    orders: Path,
    listener: JournalListener,
    *,
    stop: asyncio.Event,
    at_once: asyncio.Event,
) -> RunOutcome:
    """The same, until it is asked to stop by these."""
    with opened_run(config, listener=listener) as run, running_plane(config.data_plane) as plane:
        remote_policy = ray.remote(KillablePolicy).options(num_cpus=0)
        remote_engine = ray.remote(KillableEngine).options(num_cpus=0)
        # Whatever is called of the one, the other has.
        policy = [
            cast(
                "ActorProxy[GrpoPolicyWorker]",
                remote_policy.remote(run.config, rank=rank, orders=orders),
            )
            for rank in range(config.grpo.data_parallel_size)
        ]
        return asyncio.run(
            carry_on(
                run,
                plane=plane,
                policy=policy,
                start_engine=lambda slot: remote_engine.remote(config.model.path, orders=orders),
                stop=stop,
                at_once=at_once,
            )
        )


def engine_changes(entries: list[JournalEntry], engine: str) -> list[str]:
    """The phases that an engine went through."""
    return [
        entry.now
        for entry in entries
        if isinstance(entry, EngineChanged) and entry.engine == engine
    ]
