"""Policy workers and engines in Ray actors that move no weights and end each step as told."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import ray

from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.worker_group import GenerationGroup, PolicyGroup


class ScriptedWorker:
    """A worker of either side.

    Args:
        metadata: its answer to `prepare_checkpoint_engine`.
    """

    def __init__(self, metadata: object) -> None:
        self._metadata = metadata
        self.end_all_well()

    def end_all_well(self) -> None:
        """Be as new."""
        self._answers: dict[str, object] = {
            Step.MEASURE: 1 << 30,
            Step.PREPARE: self._metadata,
            UPDATE: True,
        }
        self._takes_s: dict[str, float] = {}
        self._halts_at: str | None = None
        self._asked: list[str] = []

    def end(self, step: str, answer: object, *, takes_s: float = 0.0) -> None:
        """End a step with an answer, or by raising one, from now on."""
        self._answers[step] = answer
        self._takes_s[step] = takes_s

    def halt_at(self, step: str) -> int:
        """Be halted by the operating system when next asked for a step; the process to wake."""
        self._halts_at = step
        return os.getpid()

    def _halt(self, step: str) -> None:
        if step == self._halts_at:
            self._halts_at = None
            os.kill(os.getpid(), signal.SIGSTOP)

    def asked(self) -> list[str]:
        """The steps that it was asked for."""
        return self._asked

    def prepare_refit_info(self, refit_info: object = None) -> object:
        """Of the policy, and for an engine."""
        self._halt("prepare_refit_info")
        return None

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: object = None, method_args: object = ()
    ) -> object:
        """Run a step."""
        self._asked.append(checkpoint_method)
        self._halt(checkpoint_method)
        time.sleep(self._takes_s.get(checkpoint_method, 0.0))
        answer = self._answers.get(checkpoint_method)
        if isinstance(answer, Exception):
            raise answer
        return answer


def scripted_workers(count: int, *, engines: bool = False) -> list[Any]:
    """Actors of one side."""
    actor = ray.remote(ScriptedWorker).options(num_cpus=0)
    return [actor.remote([{"rank": 0}] if engines else {"rank": rank}) for rank in range(count)]


def scripted_sync(
    policy: Sequence[object],
    engines: Sequence[object],
    *,
    timeout_s: object,
    step_timeout_s: float = 600.0,
    backend: str = "shm",
) -> CheckpointEngineWeightSynchronizer:
    """A synchronizer of them."""
    return CheckpointEngineWeightSynchronizer(
        PolicyGroup(policy, step_timeout_s=step_timeout_s),
        GenerationGroup(engines, async_engine=False, step_timeout_s=step_timeout_s),
        {
            "backend": backend,
            "update_weights_bucket_memory_ratio": 0.25,
            "engine_kwargs": {backend: {"refit_timeout_s": timeout_s}},
        },
        step_timeout_s=step_timeout_s,
    )
