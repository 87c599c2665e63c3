"""Real vLLM engines on the processor, in Ray actors, for models that start in seconds."""

import math
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.interfaces import CheckpointEngineConfig
from rollsync.shell.refit.vllm_generation import (
    CPU_ENVIRONMENT,
    VllmGenerationWorker,
    VllmSyncGenerationWorker,
)
from rollsync.shell.refit.worker_group import GenerationGroup, PolicyGroup
from tests.shell.conftest import ENVIRONMENT
from tests.shell.refit.reference import reference_answer
from tests.shell.refit.tiny_models import TinyPolicy

MEBIBYTE = 1024 * 1024
PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0)
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.05,
    "disable_log_stats": True,
}
PLAIN_WORKER = "tests.shell.refit.plain_worker.PlainWorker"
"""As `worker_cls`: an engine that computes with weights as they are loaded, but for `PACKED`."""
PACKED = "down_proj"
TELLS_PIDS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Environment of an engine whose ranks are asked to run a function."""


def vllm_actor(
    worker: type, model: str, *, env: Mapping[str, str] | None = None, **options: Any
) -> Any:
    """An actor with an engine, and with further environment variables."""
    environment = {**ENVIRONMENT, **CPU_ENVIRONMENT, **(env or {})}
    made: Any = ray.remote(worker).options(num_cpus=0, runtime_env={"env_vars": environment})
    return made.remote(model, {**OPTIONS, **options})


def async_engine(model: str, **options: Any) -> Any:
    return vllm_actor(VllmGenerationWorker, model, **options)


def sync_engine(model: str, **options: Any) -> Any:
    return vllm_actor(VllmSyncGenerationWorker, model, **options)


class KillingPolicy(TinyPolicy):
    """Ends another process while it sends."""

    victim: int | None = None

    def kill_at_the_last_weight(self, victim: int | None) -> None:
        """Names the process; None for none."""
        self.victim = victim

    def iter_refit_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        weights = list(super().iter_refit_weights())
        yield from weights[:-1]
        if self.victim is not None:
            os.kill(self.victim, signal.SIGKILL)
        yield weights[-1]


class RankedEngine(VllmSyncGenerationWorker):
    """Tells which processes its ranks are; in an environment with `TELLS_PIDS`."""

    def pids(self) -> list[int]:
        return list(self._llm.collective_rpc(_pid))

    def refusal_of_vllm(self) -> str:
        """The name of vLLM's error when it is asked without what refuses before it, as others drive
        it; empty if it answers."""
        from rollsync.shell.refit.vllm_calls import complete_all, sampling_params

        try:
            complete_all(self._llm, PROMPT, sampling_params(GREEDY, 11), 0)
        except Exception as error:
            return type(error).__name__
        return ""


def _pid(_: object) -> int:
    return os.getpid()


class FreshVllm:
    """An engine as vLLM starts it from saved weights, without anything of rollsync's inside."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            **options,
        )

    def answer(self, version: int) -> list[Completion]:
        """What `GREEDY` gives for `PROMPT`."""
        from rollsync.shell.refit.vllm_calls import complete_all, sampling_params

        return complete_all(self._llm, PROMPT, sampling_params(GREEDY, 11), version)


def answer_of_a_fresh_engine(saved: str, version: int) -> list[Completion]:
    """Starts an engine from saved weights, asks it, and ends it."""
    # In one process it starts three times as fast: each further one imports all of vLLM again.
    engine = vllm_actor(FreshVllm, saved, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    answer: list[Completion] = ray.get(engine.answer.remote(version))
    ray.kill(engine)
    return answer


def synchronizer(
    policy: Any | Sequence[Any],
    generation: GenerationGroup,
    backend: str = "shm",
    *,
    bucket_mebibytes: int = 64,
    **options: Any,
) -> CheckpointEngineWeightSynchronizer:
    """Connects one policy worker, or several, through buckets of a size."""
    config: CheckpointEngineConfig = {
        "backend": backend,
        "update_weights_bucket_memory_ratio": 0.5,
        "engine_kwargs": {backend: options},
    }
    sync = CheckpointEngineWeightSynchronizer(
        PolicyGroup(policy if isinstance(policy, Sequence) else [policy]), generation, config
    )
    share_bytes = sync._smallest_share()
    assert share_bytes is not None
    ratio = (bucket_mebibytes + 0.5) * MEBIBYTE / share_bytes
    config["update_weights_bucket_memory_ratio"] = ratio
    return sync


def is_answer_of(saved: str, answer: Completion, version: int) -> bool:
    """Whether an engine of several ranks, which add in another order than one, answered `PROMPT`
    with the saved weights of this version."""
    (expected,) = reference_answer(saved, PROMPT, GREEDY, version)
    return (answer.token_ids, answer.weight_version) == (
        expected.token_ids,
        expected.weight_version,
    ) and all(
        math.isclose(one, other, abs_tol=1e-4)
        for one, other in zip(answer.logprobs, expected.logprobs, strict=True)
    )


def saved_step(policy: Any, folder: Path) -> tuple[str, int]:
    """Moves the policy one step; its weights' folder, and its version."""
    saved = str(folder / "saved")
    return saved, ray.get(policy.step.remote(saved))
