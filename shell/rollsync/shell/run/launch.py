"""Starts what a configuration names (Ray, trainer, engines, run directory) and runs the controller.

Rule kept here: everything that was started is ended, whether the run ends by itself, is asked to
stop (SIGTERM, SIGINT), or fails.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.sampler import PromptGroupSampler
from rollsync.shell.grpo.client import GrpoTrainerClient
from rollsync.shell.journal import Journal, JournalListener
from rollsync.shell.refit.engines.factory import check_options
from rollsync.shell.rollout.controller import RolloutController, RunOutcome
from rollsync.shell.rollout.data_plane import DataPlane
from rollsync.shell.rollout.environments import NoEnvironmentCheckpoint
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset
from rollsync.shell.run.actors import start_engine, start_policy
from rollsync.shell.run.connect import connect, noted
from rollsync.shell.run.fleet import EngineFleet
from rollsync.shell.run.model_digest import with_model_digest
from rollsync.shell.run.placement import WorkerPlacement, connected, placed_workers
from rollsync.shell.run.planes import running_plane
from rollsync.shell.run.saved import JOURNAL, write_config
from rollsync.shell.run.tokenizer import PolicyTokenizer
from rollsync.shell.samplers import load_sampler
from rollsync.shell.store import SnapshotStore


def run_config(config: MasterConfig, *, listener: JournalListener | None = None) -> RunOutcome:
    """Run `config` in this process, resuming what its run directory holds.

    Args:
        listener: told of every journal entry.

    Raises:
        RollsyncError: the run cannot begin, or cannot go on.
    """
    sampler = load_sampler(config)
    check_options(config.checkpoint_engine)
    dataset = ReasoningGymDataset(config.data)
    # Before the tokenizer, for which transformers would ask a hub again and again.
    config = with_model_digest(config)
    tokenizer = PolicyTokenizer(config.model.path)
    directory = Path(config.run.directory)
    store = SnapshotStore(directory, config=config, dataset_digest=dataset.digest)
    with ExitStack() as started:
        started.callback(store.close)
        store.claim()  # Before anything is written: the directory may be another process's.
        write_config(config)
        journal = started.enter_context(closing(Journal(directory / JOURNAL)))
        if listener is not None:
            journal.listen(listener)
        started.enter_context(connected(config))
        placement = started.enter_context(placed_workers(config))
        plane = started.enter_context(running_plane(config.data_plane))
        return asyncio.run(
            _run(config, placement, plane, sampler, tokenizer, dataset, store, journal)
        )


async def _run(
    config: MasterConfig,
    placement: WorkerPlacement,
    plane: DataPlane,
    sampler: PromptGroupSampler,
    tokenizer: PolicyTokenizer,
    dataset: ReasoningGymDataset,
    store: SnapshotStore,
    journal: Journal,
) -> RunOutcome:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    trainer = GrpoTrainerClient(start_policy(config, placement))
    fleet = EngineFleet(
        partial(start_engine, config, placement),
        engines=config.generation.engines,
        settings=config.generation.fleet,
        notice=lambda notice: journal.write(noted(notice)),
    )
    async with fleet, trainer:
        sync, clients = connect(
            config,
            trainer=trainer,
            fleet=fleet,
            tokenizer=tokenizer,
            verifier=dataset,
            journal=journal,
        )
        controller = RolloutController(
            config,
            sampler=sampler,
            clients=clients,
            dataloader=PromptDataloader(dataset, max_epochs=config.data.max_epochs),
            plane=plane,
            archive=store,
            environment=NoEnvironmentCheckpoint(),
            journal=journal,
        )
        outcome = await controller.run(stop)
        await sync.shutdown()
        return outcome
