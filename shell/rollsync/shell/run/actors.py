"""Starts the policy workers and the engines that a configuration names, each where it was placed.

Rule kept here: an engine is made from the configuration and its slot alone, so that one that is
gone can be made again.
"""

from __future__ import annotations

import os

import ray
from ray.actor import ActorProxy

from rollsync.pure.config import MasterConfig
from rollsync.shell.grpo.worker import GrpoPolicyWorker
from rollsync.shell.refit.worker_group import Actor
from rollsync.shell.run.placement import WorkerPlacement


def start_policy(
    config: MasterConfig, placement: WorkerPlacement
) -> tuple[ActorProxy[GrpoPolicyWorker], ...]:
    """The policy workers by rank, each in its own process."""
    return tuple(
        ray.remote(GrpoPolicyWorker)
        .options(**placement.policy_options(rank))
        .remote(config, rank=rank, workers_on_host=placement.policy_workers_on_host(rank))
        for rank in range(config.grpo.data_parallel_size)
    )


def start_engine(config: MasterConfig, placement: WorkerPlacement, slot: int) -> Actor:
    """The engine of a slot, in its own process."""
    if config.generation.backend == "torch":
        return _torch_engine(config, placement, slot)
    return _vllm_engine(config, placement, slot)


def _torch_engine(config: MasterConfig, placement: WorkerPlacement, slot: int) -> Actor:
    from rollsync.shell.refit.torch_generation import TorchGenerationWorker

    actor = ray.remote(TorchGenerationWorker).options(**placement.engine_options(slot))
    return actor.remote(
        config.model.path,
        workers_on_host=placement.engine_workers_on_host(slot),
        threads=1 if config.run.deterministic else 0,
    )


def _vllm_engine(config: MasterConfig, placement: WorkerPlacement, slot: int) -> Actor:
    from rollsync.shell.refit.vllm_generation import CPU_ENVIRONMENT, VllmGenerationWorker

    environment = {**CPU_ENVIRONMENT, **_offline(os.environ)}
    actor = ray.remote(VllmGenerationWorker).options(
        **placement.engine_options(slot), runtime_env={"env_vars": environment}
    )
    options = {
        "max_model_len": config.generation.max_model_len,
        "max_num_seqs": config.generation.max_concurrent_requests,
        "enforce_eager": True,
        "dtype": "float32",
        "seed": config.run.seed,
    }
    # Its workers know of themselves only; the synchronizer counts who else is on their host.
    return actor.remote(config.model.path, options)


def _offline(environment: os._Environ[str]) -> dict[str, str]:
    """Settings of this process that keep the engines from looking anything up."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS")
    return {name: environment[name] for name in names if name in environment}
