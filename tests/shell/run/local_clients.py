"""A trainer and an engine in one process: real models, and weights copied between the two.

They are what the controller needs beside its own parts, without Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollsync.pure.config import MasterConfig
from rollsync.shell.grpo import StepMetrics, TrainingRow
from rollsync.shell.grpo.trainer import GrpoTrainer
from rollsync.shell.refit.generation import SamplingSettings
from rollsync.shell.refit.torch_generation import sample
from rollsync.shell.rollout.clients import (
    GeneratedCompletion,
    GenerationFailed,
    GenerationRequest,
    SyncFigures,
)


class LocalTrainer:
    """`GrpoTrainer` on a thread, so that the event loop goes on beside it.

    Args:
        committing: called in the middle of every optimizer commit.
    """

    def __init__(self, config: MasterConfig, *, committing: Callable[[], None]) -> None:
        self._committing = committing
        self.trainer = GrpoTrainer(
            config.model.path,
            config.grpo,
            temperature=config.generation.temperature,
            threads=1,
            deterministic=config.run.deterministic,
        )

    @property
    def trainer_version(self) -> int:
        return self.trainer.trainer_version

    async def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        return await asyncio.to_thread(self.trainer.compute_gradients, groups)

    async def apply_gradients(self) -> None:
        self._committing()
        # So long that what a signal sets going meets the commit.
        await asyncio.sleep(0.02)
        await asyncio.to_thread(self.trainer.apply_gradients)

    async def skip_step(self) -> None:
        self.trainer.trainer_version += 1

    async def save(self, directory: Path) -> None:
        await asyncio.to_thread(self.trainer.save, directory)

    async def load(self, directory: Path) -> None:
        await asyncio.to_thread(self.trainer.load, directory)


class LocalEngine:
    """One torch engine with weights of its own; `poison` is the prompt it always fails on."""

    def __init__(
        self, config: MasterConfig, *, end_token_id: int, poison: tuple[int, ...] | None
    ) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(config.model.path).eval()
        self._end_token_id = end_token_id
        self._poison = poison
        self._turn = asyncio.Lock()
        self._weight_version: int | None = None

    async def generate(self, request: GenerationRequest) -> GeneratedCompletion:
        if request.prompt_token_ids == self._poison:
            # It takes its time to fail, so that a kill finds it running.
            await asyncio.sleep(0.02)
            raise GenerationFailed("this prompt never works")
        sampling = SamplingSettings(
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            stop_token_ids=(self._end_token_id,),
        )
        async with self._turn:
            assert self._weight_version is not None, "asked before the first sync"
            (made,) = await asyncio.to_thread(
                sample,
                self._model,
                request.prompt_token_ids,
                sampling,
                request.seed,
                self._weight_version,
            )
        return GeneratedCompletion(
            token_ids=made.token_ids,
            log_probabilities=made.logprobs,
            finished=made.finish_reason == "stop",
            weight_version=made.weight_version,
        )

    async def take_weights(self, trainer: GrpoTrainer) -> SyncFigures:
        """Become a copy of the trainer's model, between two requests."""
        async with self._turn:
            began_s = time.perf_counter()
            with torch.no_grad():
                self._model.load_state_dict(trainer.module.state_dict())
            self._weight_version = trainer.trainer_version
            size = sum(each.numel() * each.element_size() for each in self._model.parameters())
            return SyncFigures(
                weight_version=trainer.trainer_version,
                bytes=size,
                seconds=time.perf_counter() - began_s,
            )
