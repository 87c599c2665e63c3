"""The GRPO trainer as a Ray actor, one for each policy worker of a run.

Rule kept here: the actor does what it is told, one call at a time, and says afterwards what it
holds, so that whoever called all of them can tell whether they still hold the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import ray
import torch
from msgspec import Struct

from rollsync.pure.config import MasterConfig
from rollsync.pure.refit import TensorSpec
from rollsync.shell.grpo.replicas import Meeting, Replicas, weights_digest
from rollsync.shell.grpo.trainer import (
    GrpoTrainer,
    StepMetrics,
    TrainerCheckpointError,
    TrainingRow,
)
from rollsync.shell.refit.policy_worker import PolicyRefitMixin
from rollsync.shell.refit.weights import checkpoint_weights, declare_weights


class Holding(Struct, frozen=True, kw_only=True):
    """What a policy worker holds."""

    trainer_version: int
    weights_digest: str
    """Of the weights' bits; empty where there is no other worker to compare it with."""


class GrpoPolicyWorker(PolicyRefitMixin):
    """One policy worker: a replica of the model, which trains its share of each step.

    Args:
        config: the run's configuration.
        rank: which of the run's policy workers it is, from 0.
        workers_on_host: how many workers share this host's memory.
    """

    def __init__(self, config: MasterConfig, *, rank: int = 0, workers_on_host: int) -> None:
        self.refit_rank = rank
        self._alone = config.grpo.data_parallel_size == 1
        self._workers_on_host = workers_on_host
        self._replicas = Replicas(
            rank=rank,
            world_size=config.grpo.data_parallel_size,
            timeout_s=config.cluster.collective_timeout_s,
        )
        self._trainer = GrpoTrainer(
            config.model.path,
            config.grpo,
            temperature=config.generation.temperature,
            threads=1 if config.run.deterministic else None,
            deterministic=config.run.deterministic,
            replicas=self._replicas,
        )

    @property
    def workers_on_host(self) -> int:
        """How many workers share this host's memory."""
        return self._workers_on_host

    def weight_version(self) -> int:
        """The trainer version of the weights."""
        return self._trainer.trainer_version

    def iter_refit_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights by their checkpoint names."""
        return checkpoint_weights(self._trainer.module)

    def prepare_refit_info(self) -> Mapping[str, TensorSpec]:
        """What `iter_refit_weights` yields."""
        return declare_weights(self._trainer.module)

    @ray.method
    def holding(self) -> Holding:
        """What it holds now."""
        return self._holding_now()

    @ray.method
    def open_meeting(self) -> Meeting:
        """Have the first worker wait for the others."""
        return self._replicas.open()

    @ray.method
    def join(self, meeting: Meeting) -> None:
        """Meet the other workers."""
        self._replicas.join(meeting)

    @ray.method
    def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        """The gradients of one step, of which `groups` are this worker's share."""
        return self._trainer.compute_gradients(groups)

    @ray.method
    def apply_gradients(self) -> Holding:
        """Take the step."""
        self._trainer.apply_gradients()
        return self._holding_now()

    @ray.method
    def skip_step(self) -> Holding:
        """Count a step without training."""
        self._trainer.trainer_version += 1
        return self._holding_now()

    @ray.method
    def save(self, directory: str) -> None:
        """Write the trainer's files."""
        self._trainer.save(Path(directory))

    @ray.method
    def load(self, directory: str) -> Holding:
        """Become what a checkpoint holds.

        Raises:
            TrainerCheckpointError: this worker cannot read it, or it is of another model.
        """
        try:
            self._trainer.load(Path(directory))
        except TrainerCheckpointError as error:
            raise TrainerCheckpointError(
                f"policy worker {self.refit_rank}: {error.message}", remedy=error.remedy
            ) from error
        return self._holding_now()

    def _holding_now(self) -> Holding:
        return Holding(
            trainer_version=self._trainer.trainer_version,
            weights_digest="" if self._alone else weights_digest(self._trainer.module),
        )
