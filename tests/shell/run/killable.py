"""A trainer and an engine that kill or halt their own process where an order says so.

An order is a file named after the moment. Whoever takes it away first carries it out, so each
order costs one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from rollsync.pure.config import MasterConfig
from rollsync.shell.grpo import StepMetrics, TrainingRow
from rollsync.shell.grpo.trainer import GrpoTrainer
from rollsync.shell.grpo.worker import GrpoPolicyWorker
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.intake import Batch
from rollsync.shell.refit.load_recorder import LoadRecorder
from rollsync.shell.refit.refit_receiver import ModelUpdate
from rollsync.shell.refit.torch_generation import TorchGenerationWorker
from rollsync.shell.refit.torch_update import TorchModelUpdate

GENERATING = "generating"
LOADING = "loading"
FINISHING = "finishing"
UPDATING = "update_weights_from_checkpoint_engine"
SETTING_UP = (
    "finalize_checkpoint_engine",
    "init_checkpoint_engine",
    "prepare_checkpoint_engine",
    "init_checkpoint_engine_process_group",
)
"""Moments of an engine whose fleet has become another one."""
ENGINE_MOMENTS = (GENERATING, *SETTING_UP, UPDATING, LOADING, FINISHING)
GRADIENTS = "gradients"
COMMITTING = "committing"
SENDING = "sending"
SAVING = "saving"
POLICY_MOMENTS = (GRADIENTS, COMMITTING, SENDING, SAVING)


def order(orders: Path, moment: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the next process at `moment` send itself a signal."""
    draft = orders / f"{moment}.draft"
    draft.write_text(str(int(number)))
    draft.rename(orders / moment)


def of_rank(moment: str, rank: int) -> str:
    """The moment of one policy worker."""
    return f"{moment}-{rank}"


def obey(orders: Path, moment: str) -> None:
    """Die or halt if it is ordered."""
    try:
        number = int((orders / moment).read_text())
        (orders / moment).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), number)


class KillableEngine(TorchGenerationWorker):
    """A torch engine that obeys."""

    def __init__(self, model: str, *, orders: Path) -> None:
        super().__init__(model, workers_on_host=4, threads=1)
        self._orders = orders
        self._receiver._make_update = lambda recorder: _KillableUpdate(
            self._model, recorder, orders
        )

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> object:
        obey(self._orders, checkpoint_method)
        return await super().checkpoint_engine_rpc_async(checkpoint_method, method_args)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        weight_version: int | None = None,
    ) -> list[Completion]:
        async with self._gate.request():
            obey(self._orders, GENERATING)
        return await super().generate(
            prompt_token_ids, sampling, seed=seed, weight_version=weight_version
        )


class _KillableUpdate(TorchModelUpdate, ModelUpdate):
    def __init__(self, model: torch.nn.Module, recorder: LoadRecorder | None, orders: Path) -> None:
        super().__init__(model, recorder)
        self._orders = orders

    def load(self, batch: Batch, /) -> None:
        super().load(batch)
        obey(self._orders, LOADING)

    def finish(self) -> None:
        super().finish()
        obey(self._orders, FINISHING)


class _KillableTrainer(GrpoTrainer):
    def obey_from_now_on(self, obey_at: Callable[[str], None]) -> None:
        self._obey_at = obey_at

    def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        self._obey_at(GRADIENTS)
        return super().compute_gradients(groups)

    def apply_gradients(self) -> None:
        super().apply_gradients()
        self._obey_at(COMMITTING)

    def save(self, directory: Path) -> None:
        super().save(directory)
        self._obey_at(SAVING)


class KillablePolicy(GrpoPolicyWorker):
    """A policy worker. It obeys what it is ordered, and what whoever comes first is."""

    def __init__(self, config: MasterConfig, *, rank: int, orders: Path) -> None:
        super().__init__(config, rank=rank, workers_on_host=4)
        self._orders = orders
        trainer = _KillableTrainer(
            config.model.path,
            config.grpo,
            temperature=config.generation.temperature,
            threads=1,
            deterministic=config.run.deterministic,
            replicas=self._replicas,
        )
        trainer.obey_from_now_on(self._obey)
        self._trainer = trainer

    def iter_refit_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        for number, weight in enumerate(super().iter_refit_weights()):
            if number == 1:
                self._obey(SENDING)
            yield weight

    def _obey(self, moment: str) -> None:
        obey(self._orders, moment)
        obey(self._orders, of_rank(moment, self.refit_rank))
