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
from rollsync.shell.grpo.client import GrpoTrainerClient
from rollsync.shell.grpo.worker import GrpoPolicyWorker
from rollsync.shell.journal import EngineChanged, Journal, JournalEntry
from rollsync.shell.refit.worker_group import Actor
from rollsync.shell.rollout.controller import RolloutController, RunOutcome
from rollsync.shell.rollout.data_plane import DataPlane
from rollsync.shell.rollout.environments import NoEnvironmentCheckpoint
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset
from rollsync.shell.run.connect import connect, noted
from rollsync.shell.run.fleet import EngineFleet
from rollsync.shell.run.planes import running_plane
from rollsync.shell.run.saved import JOURNAL, write_config
from rollsync.shell.run.tokenizer import PolicyTokenizer
from rollsync.shell.samplers import load_sampler
from rollsync.shell.store import SnapshotStore
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
    with running_plane(config.data_plane) as plane:
        return asyncio.run(_run(config, orders, direct, plane))


async def _run(
    config: MasterConfig, orders: Path, direct: Director, plane: DataPlane
) -> RunOutcome:
    dataset = ReasoningGymDataset(config.data)
    tokenizer = PolicyTokenizer(config.model.path)
    store = SnapshotStore(Path(config.run.directory), config=config, dataset_digest=dataset.digest)
    write_config(config)
    stop = asyncio.Event()
    journal = Journal(Path(config.run.directory) / JOURNAL)
    journal.listen(lambda entry: stop.set() if direct(entry) else None)
    remote_policy = ray.remote(KillablePolicy).options(num_cpus=0)
    # Whatever is called of the one, the other has.
    policy = [
        cast("ActorProxy[GrpoPolicyWorker]", remote_policy.remote(config, rank=rank, orders=orders))
        for rank in range(config.grpo.data_parallel_size)
    ]
    remote_engine = ray.remote(KillableEngine).options(num_cpus=0)

    def start(slot: int) -> Actor:
        return remote_engine.remote(config.model.path, orders=orders)

    fleet = EngineFleet(
        start,
        engines=config.generation.engines,
        settings=config.generation.fleet,
        notice=lambda notice: journal.write(noted(notice)),
    )
    trainer = GrpoTrainerClient(policy)
    try:
        async with fleet, trainer:
            _, clients = connect(
                config,
                trainer=trainer,
                fleet=fleet,
                tokenizer=tokenizer,
                verifier=dataset,
                journal=journal,
            )
            controller = RolloutController(
                config,
                sampler=load_sampler(config),
                clients=clients,
                dataloader=PromptDataloader(dataset, max_epochs=config.data.max_epochs),
                plane=plane,
                archive=store,
                environment=NoEnvironmentCheckpoint(),
                journal=journal,
            )
            return await controller.run(stop)
    finally:
        journal.close()
        store.close()


def engine_changes(entries: list[JournalEntry], engine: str) -> list[str]:
    """The phases that an engine went through."""
    return [
        entry.now
        for entry in entries
        if isinstance(entry, EngineChanged) and entry.engine == engine
    ]
