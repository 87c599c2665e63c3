"""Policy workers on a Ray cluster that can be told to go astray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import ray
import torch
from ray.actor import ActorProxy

from rollsync.pure.config import (
    ClusterConfig,
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    MasterConfig,
    ModelConfig,
    RunConfig,
)
from rollsync.pure.rollout.sampler import InOrderSampler
from rollsync.shell.grpo.client import GrpoTrainerClient
from rollsync.shell.grpo.worker import GrpoPolicyWorker
from rollsync.shell.refit.worker_group import Actor, call_remote

GRPO = GrpoConfig(
    num_prompts_per_step=4,
    num_generations_per_prompt=2,
    max_steps=8,
    learning_rate=1e-3,
    data_parallel_size=2,
)


class AstrayWorker(GrpoPolicyWorker):
    """A policy worker whose weights can change behind everybody's back."""

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def drift(self) -> None:
        """Change the lowest bit of one weight."""
        with torch.no_grad():
            weight = next(self._trainer.module.parameters()).view(torch.int32)
            weight[0, 0] ^= 1


def config_of(model: str, directory: Path, *, collective_timeout_s: float = 60.0) -> MasterConfig:
    """Two policy workers."""
    return MasterConfig(
        run=RunConfig(directory=str(directory), deterministic=True),
        data=DataConfig(task="chain_sum", size=16),
        model=ModelConfig(path=model),
        grpo=GRPO,
        generation=GenerationConfig(backend="torch", max_new_tokens=4),
        sampler=InOrderSampler(max_lookahead_versions=0),
        cluster=ClusterConfig(collective_timeout_s=collective_timeout_s),
    )


def two_workers(config: MasterConfig) -> GrpoTrainerClient:
    """A client of two workers that have not met yet: `start` comes first."""
    remote = ray.remote(AstrayWorker).options(num_cpus=0)
    workers = [
        cast("ActorProxy[GrpoPolicyWorker]", remote.remote(config, rank=rank, workers_on_host=2))
        for rank in range(2)
    ]
    return GrpoTrainerClient(workers, timeout_s=config.cluster.collective_timeout_s)


def tell(client: GrpoTrainerClient, rank: int, what: str) -> object:
    """Call a method of `AstrayWorker`."""
    worker: Actor = client.workers[rank]
    return ray.get(call_remote(worker, what))
