"""The GRPO trainer as a Ray actor, and what the controller sees of it.

Rule kept here: the actor does what it is told, one call at a time; whoever holds the client knows
the trainer's version without asking, as of the last answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
from ray.actor import ActorProxy
from ray.exceptions import RayActorError

from rollsync.pure.config import MasterConfig
from rollsync.pure.refit import TensorSpec
from rollsync.shell.grpo.trainer import GrpoTrainer, StepMetrics, TrainingRow
from rollsync.shell.refit.policy_worker import PolicyRefitMixin
from rollsync.shell.refit.weights import checkpoint_weights, declare_weights
from rollsync.shell.rollout.clients import TrainerLost


class GrpoPolicyWorker(PolicyRefitMixin):
    """One trainer of one rank.

    Args:
        config: the run's configuration.
        workers_on_host: how many workers share this host's memory.
    """

    def __init__(self, config: MasterConfig, *, workers_on_host: int) -> None:
        self._workers_on_host = workers_on_host
        self._trainer = GrpoTrainer(
            config.model.path,
            config.grpo,
            temperature=config.generation.temperature,
            threads=1 if config.run.deterministic else None,
            deterministic=config.run.deterministic,
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
    def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        """The gradients of one step."""
        return self._trainer.compute_gradients(groups)

    @ray.method
    def apply_gradients(self) -> int:
        """Take the step; the version."""
        self._trainer.apply_gradients()
        return self._trainer.trainer_version

    @ray.method
    def skip_step(self) -> int:
        """Count a step without training; the version."""
        self._trainer.trainer_version += 1
        return self._trainer.trainer_version

    @ray.method
    def save(self, directory: str) -> None:
        """Write the trainer's files."""
        self._trainer.save(Path(directory))

    @ray.method
    def load(self, directory: str) -> int:
        """Become what a checkpoint holds; the version."""
        self._trainer.load(Path(directory))
        return self._trainer.trainer_version


@contextmanager
def trainer_calls() -> Iterator[None]:
    """Calls of a policy worker: its death comes out as `TrainerLost`."""
    try:
        yield
    except RayActorError as error:
        raise trainer_lost(error) from error


def trainer_lost(error: Exception) -> TrainerLost:
    """The loss of a policy worker, with Ray's reason."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return TrainerLost(
        f"a policy worker is gone: {reason}",
        remedy="see Ray's log of the worker; the same command goes on from the last save",
    )


class GrpoTrainerClient:
    """The controller's trainer: see `rollsync.shell.rollout.clients.TrainerClient`.

    Args:
        worker: the actor.
    """

    def __init__(self, worker: ActorProxy[GrpoPolicyWorker]) -> None:
        self._worker = worker
        self.trainer_version = 0

    async def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        """The gradients of one step."""
        with trainer_calls():
            return await self._worker.compute_gradients.remote(groups)

    async def apply_gradients(self) -> None:
        """Take the step."""
        with trainer_calls():
            self.trainer_version = await self._worker.apply_gradients.remote()

    async def skip_step(self) -> None:
        """Count a step that had nothing to train."""
        with trainer_calls():
            self.trainer_version = await self._worker.skip_step.remote()

    async def save(self, directory: Path) -> None:
        """Write the trainer's files into `directory`."""
        with trainer_calls():
            await self._worker.save.remote(str(directory))

    async def load(self, directory: Path) -> None:
        """Become what the checkpoint in `directory` holds."""
        with trainer_calls():
            self.trainer_version = await self._worker.load.remote(str(directory))
