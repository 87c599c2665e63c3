"""Starts what a configuration names (Ray, trainer, engines, run directory) and runs the controller.

Rule kept here: everything that was started is ended, whether the run ends by itself, is asked to
stop (SIGTERM, SIGINT), or fails; and a stop is heeded at once, in whatever the run waits for: the
first lets the step end that is being trained, if that is what there is to save, and the second does
not.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ray.actor import ActorProxy

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.sampler import PromptGroupSampler
from rollsync.shell.grpo.client import GrpoTrainerClient
from rollsync.shell.grpo.worker import GrpoPolicyWorker
from rollsync.shell.journal import Journal, JournalListener
from rollsync.shell.refit.engines.factory import check_options
from rollsync.shell.refit.worker_group import Actor
from rollsync.shell.rollout.controller import RolloutController, RunOutcome
from rollsync.shell.rollout.data_plane import DataPlane
from rollsync.shell.rollout.environments import NoEnvironmentCheckpoint
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset
from rollsync.shell.rollout.stopping import asked_by, done_before, result_before
from rollsync.shell.run.actors import start_engine, start_policy
from rollsync.shell.run.clients import make_clients, noted
from rollsync.shell.run.fleet import EngineFleet
from rollsync.shell.run.model_digest import with_model_digest
from rollsync.shell.run.model_directory import check_model_directory
from rollsync.shell.run.placement import WorkerPlacement, connected, placed_workers
from rollsync.shell.run.planes import running_plane
from rollsync.shell.run.saved import JOURNAL, write_config
from rollsync.shell.run.tokenizer import PolicyTokenizer
from rollsync.shell.samplers import load_sampler
from rollsync.shell.store import SnapshotStore

RELEASE_S: Final = 10.0
"""Longest wait, at the end of a run, for workers to release what a sync holds: one may be busy
with a step that nobody waits for any more, or halted, and they are ended next."""


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run whose directory is this process's: what it works with beside its workers."""

    config: MasterConfig
    sampler: PromptGroupSampler
    dataset: ReasoningGymDataset
    tokenizer: PolicyTokenizer
    store: SnapshotStore
    journal: Journal


def run_config(config: MasterConfig, *, listener: JournalListener | None = None) -> RunOutcome:
    """Run `config` in this process, resuming what its run directory holds.

    Args:
        listener: told of every journal entry.

    Raises:
        RollsyncError: the run cannot begin, or cannot go on.
    """
    check_options(config.checkpoint_engine)
    with (
        opened_run(config, listener=listener) as run,
        connected(run.config),
        placed_workers(run.config) as placement,
        running_plane(run.config.data_plane) as plane,
    ):
        return asyncio.run(_run(run, placement, plane))


@contextmanager
def opened_run(
    config: MasterConfig, *, listener: JournalListener | None = None
) -> Iterator[OpenRun]:
    """Claim the run directory and open its journal, until the end of the context.

    Raises:
        RollsyncError: the run cannot begin.
    """
    sampler = load_sampler(config)
    dataset = ReasoningGymDataset(config.data)
    # Before the tokenizer, for which transformers would ask a hub again and again.
    check_model_directory(config.model.path)
    config = with_model_digest(config)
    tokenizer = PolicyTokenizer(config.model.path)
    directory = Path(config.run.directory)
    store = SnapshotStore(directory, config=config, dataset_digest=dataset.digest)
    with closing(store):
        store.claim()  # Before anything is written: the directory may be another process's.
        write_config(config)
        with closing(Journal(directory / JOURNAL)) as journal:
            if listener is not None:
                journal.listen(listener)
            yield OpenRun(
                config=config,
                sampler=sampler,
                dataset=dataset,
                tokenizer=tokenizer,
                store=store,
                journal=journal,
            )


async def _run(run: OpenRun, placement: WorkerPlacement, plane: DataPlane) -> RunOutcome:
    stop, at_once = asked_by(signal.SIGTERM, signal.SIGINT)
    return await carry_on(
        run,
        plane=plane,
        policy=start_policy(run.config, placement),
        start_engine=partial(start_engine, run.config, placement),
        stop=stop,
        at_once=at_once,
    )


async def carry_on(
    run: OpenRun,
    *,
    plane: DataPlane,
    policy: Sequence[ActorProxy[GrpoPolicyWorker]],
    start_engine: Callable[[int], Actor],
    stop: asyncio.Event,
    at_once: asyncio.Event,
) -> RunOutcome:
    """One process's part of a run, with its workers; they are ended with it.

    Args:
        plane: where rows are.
        policy: the policy workers, by rank.
        start_engine: starts the engine of a slot; see `EngineFleet`.
        stop: set when the run is to stop, when it has saved what it has.
        at_once: set when it is to stop without that.

    Raises:
        RollsyncError: the run cannot go on; it can be resumed.
    """
    config, journal = run.config, run.journal
    trainer = GrpoTrainerClient(policy, timeout_s=config.cluster.collective_timeout_s)
    fleet = EngineFleet(
        start_engine,
        engines=config.generation.engines,
        settings=config.generation.fleet,
        notice=lambda notice: journal.write(noted(notice)),
    )
    sync, clients = make_clients(
        config,
        trainer=trainer,
        fleet=fleet,
        tokenizer=run.tokenizer,
        verifier=run.dataset,
        journal=journal,
    )
    controller = RolloutController(
        config,
        sampler=run.sampler,
        clients=clients,
        dataloader=PromptDataloader(run.dataset, max_epochs=config.data.max_epochs),
        plane=plane,
        archive=run.store,
        environment=NoEnvironmentCheckpoint(),
        journal=journal,
    )
    async with fleet, trainer:
        if not await done_before(stop, trainer.start()):
            return controller.not_begun()
        outcome = await result_before(at_once, controller.run(stop))
        if outcome is None:
            return controller.cut_short()
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await sync.shutdown()
        return outcome
