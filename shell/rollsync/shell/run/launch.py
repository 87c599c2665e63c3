"""Starts what a configuration names (Ray, trainer, engines, run directory) and runs the controller.

Rule kept here: everything that was started is ended, whether the run ends by itself, is asked to
stop (SIGTERM, SIGINT), or fails.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from ray.exceptions import RayError

from rollsync.pure.config import MasterConfig
from rollsync.shell.grpo.worker import GrpoTrainerClient
from rollsync.shell.journal import Journal, JournalListener
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.errors import EngineNotServing, EngineOutdated, RefitError
from rollsync.shell.refit.generation import SamplingSettings
from rollsync.shell.refit.worker_group import GenerationGroup, PolicyGroup
from rollsync.shell.rollout.clients import (
    EnginesLost,
    GeneratedCompletion,
    GenerationFailed,
    GenerationRequest,
    SyncFigures,
)
from rollsync.shell.rollout.controller import RolloutController, RunClients, RunOutcome
from rollsync.shell.rollout.environments import NoEnvironmentCheckpoint
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset
from rollsync.shell.run.actors import start_engine, start_policy
from rollsync.shell.run.placement import WorkerPlacement, connected, placed_workers
from rollsync.shell.run.planes import running_plane
from rollsync.shell.run.saved import JOURNAL, write_config
from rollsync.shell.run.tokenizer import PolicyTokenizer
from rollsync.shell.samplers import load_sampler
from rollsync.shell.store import SnapshotStore


class EngineClient:
    """The engines, as the rollout pump asks them.

    Args:
        engines: the engines.
        end_token_id: the token that ends a completion.
    """

    def __init__(self, engines: GenerationGroup, *, end_token_id: int) -> None:
        self._engines = engines
        self._end_token_id = end_token_id

    async def generate(self, request: GenerationRequest) -> GeneratedCompletion:
        """See `rollsync.shell.rollout.clients.GenerationClient`."""
        sampling = SamplingSettings(
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            stop_token_ids=(self._end_token_id,),
        )
        try:
            (completion,) = await self._engines.generate(
                request.prompt_token_ids, sampling, seed=request.seed
            )
        except (EngineNotServing, EngineOutdated):
            raise
        except RefitError as error:
            raise GenerationFailed(f"an engine gave a request up: {error}") from error
        except RayError as error:
            raise EnginesLost(
                f"an engine failed: {str(error).strip().splitlines()[-1]}",
                remedy="see Ray's logs of the engine; the same command goes on from the last save",
            ) from error
        return GeneratedCompletion(
            token_ids=completion.token_ids,
            log_probabilities=completion.logprobs,
            finished=completion.finish_reason == "stop",
            weight_version=completion.weight_version,
        )


class Synchronizer:
    """The weight synchronizer, as the train pump calls it.

    Args:
        synchronizer: does the work; its calls block.
    """

    def __init__(self, synchronizer: CheckpointEngineWeightSynchronizer) -> None:
        self._synchronizer = synchronizer
        self._connected = False

    async def __call__(self) -> SyncFigures:
        """Move the weights; connect first, the first time."""
        if not self._connected:
            await asyncio.to_thread(self._synchronizer.init_communicator)
            self._connected = True
        report = await asyncio.to_thread(self._synchronizer.sync_weights)
        if report.weight_version is None:
            raise RefitError("the engines did not say which weights they serve")
        return SyncFigures(
            weight_version=report.weight_version,
            bytes=report.payload_bytes,
            seconds=report.total_s,
        )

    async def shutdown(self) -> None:
        """Release what the connection holds."""
        await asyncio.to_thread(self._synchronizer.shutdown)


def run_config(config: MasterConfig, *, listener: JournalListener | None = None) -> RunOutcome:
    """Run `config` in this process, resuming what its run directory holds.

    Args:
        listener: told of every journal entry.

    Raises:
        RollsyncError: the run cannot begin, or cannot go on.
    """
    sampler = load_sampler(config)
    tokenizer = PolicyTokenizer(config.model.path)
    dataset = ReasoningGymDataset(config.data)
    store = SnapshotStore(Path(config.run.directory), config=config, dataset_digest=dataset.digest)
    write_config(config)
    journal = Journal(Path(config.run.directory) / JOURNAL)
    if listener is not None:
        journal.listen(listener)
    try:
        with (
            connected(config),
            placed_workers(config) as placement,
            running_plane(config.data_plane) as plane,
        ):
            sync, clients = _connect(config, placement, tokenizer, dataset)
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
            return asyncio.run(_run_until_stopped(controller, sync))
    finally:
        journal.close()


def _connect(
    config: MasterConfig,
    placement: WorkerPlacement,
    tokenizer: PolicyTokenizer,
    dataset: ReasoningGymDataset,
) -> tuple[Synchronizer, RunClients]:
    """The actors of a run, as the controller works with them."""
    policy = start_policy(config, placement)
    engines = [start_engine(config, placement, i) for i in range(config.generation.engines)]
    trainer = GrpoTrainerClient(policy)
    generation = GenerationGroup(engines)
    sync = Synchronizer(
        CheckpointEngineWeightSynchronizer(
            PolicyGroup([policy]),
            generation,
            {
                "backend": config.checkpoint_engine.backend,
                "update_weights_bucket_memory_ratio": (
                    config.checkpoint_engine.update_weights_bucket_memory_ratio
                ),
                "engine_kwargs": config.checkpoint_engine.engine_kwargs,
            },
        )
    )
    clients = RunClients(
        trainer=trainer,
        load_trainer=trainer.load,
        generation=EngineClient(generation, end_token_id=tokenizer.end_token_id),
        sync=sync,
        codec=tokenizer,
        verifier=dataset,
    )
    return sync, clients


async def _run_until_stopped(controller: RolloutController, sync: Synchronizer) -> RunOutcome:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    outcome = await controller.run(stop)
    await sync.shutdown()
    return outcome
