"""Synchronous engines of two ranks, which share a model with tied embeddings: by slices of its
weights, or by its layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from rollsync.pure.refit.lifecycle import Poisoned, Serving
from rollsync.shell.refit.errors import EngineNotServing
from rollsync.shell.refit.vllm_generation import VllmSyncGenerationWorker
from rollsync.shell.refit.worker_group import GenerationGroup
from tests.shell.refit.tiny_models import TinyPolicy, make_model, save_model
from tests.shell.refit.vllm_engines import (
    GREEDY,
    PROMPT,
    is_answer_of,
    saved_step,
    synchronizer,
    vllm_actor,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 128
"""So many rows divide by two ranks without padding."""
STAGES: Mapping[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1},
    "max_num_batched_tokens": 128,
}
"""On a processor, vLLM 0.32 makes a later stage's buffer for what comes from the stage before in a
warm-up that it leaves out of an eager engine, which then fails at its first request. So this one is
not eager by name; its environment has torch compile nothing."""
NOT_EAGER = {"TORCH_COMPILE_DISABLE": "0", "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.usefixtures("cluster")
def test_two_ranks_of_an_engine_take_their_slices_of_tied_weights(tmp_path: Path) -> None:
    received = refit_two_ranks(tmp_path, policy_workers=1, tensor_parallel_size=2)
    # The first sync is whole; in those after it a rank gets what it keeps: half of all but norms.
    whole_bytes = received[0][0]
    assert received[0] == (whole_bytes, whole_bytes)
    assert all(whole_bytes / 2 <= part < 0.52 * whole_bytes for part in received[1])
    assert received[2:] == [received[1], received[0], received[1]]


@pytest.mark.usefixtures("cluster")
def test_two_stages_of_an_engine_take_their_layers_each_from_its_policy_worker(
    tmp_path: Path,
) -> None:
    received = refit_two_ranks(tmp_path, policy_workers=2, env=NOT_EAGER, **STAGES)
    size = {
        name: tensor.nbytes
        for name, tensor in make_model(tied=True, vocabulary=VOCABULARY).named_parameters()
    }
    whole_bytes = sum(size.values())
    # The last stage's head is tied to the embeddings, which are the first stage's.
    stages = (("embed_tokens", "layers.0"), ("embed_tokens", "layers.1", "norm"))
    kept = tuple(
        sum(size[name] for name in size if name.removeprefix("model.").startswith(stage))
        for stage in stages
    )
    # The stream that broke was the first stage's only.
    whole = (whole_bytes, whole_bytes)
    assert received == [whole, kept, kept, (whole_bytes, kept[1]), kept]


def refit_two_ranks(
    folder: Path, *, policy_workers: int, env: Mapping[str, str] | None = None, **options: Any
) -> list[tuple[int, ...]]:
    """Has an engine serve three versions, refuse a mixture, and serve again.

    Args:
        folder: for the models.
        policy_workers: how many send.
        env: further environment variables of the engine.
        options: of the engine: how its ranks share the model.

    Returns:
        The bytes that each rank received in each of these syncs: three, and two after one that the
        first policy worker broke.
    """
    start = save_model(folder / "start", tied=True, vocabulary=VOCABULARY)
    policy: list[Any] = [
        ray.remote(TinyPolicy)
        .options(num_cpus=0)
        .remote(tied=True, rank=rank, vocabulary=VOCABULARY)
        for rank in range(policy_workers)
    ]
    engine = vllm_actor(
        VllmSyncGenerationWorker, start, env=env, distributed_executor_backend="mp", **options
    )
    generation = GenerationGroup([engine], ranks_per_engine=2, async_engine=False)
    sync = synchronizer(policy, generation, bucket_mebibytes=1, ranks=2)
    sync.init_communicator()
    with pytest.raises(EngineNotServing):
        ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
    received: list[tuple[int, ...]] = []
    for _ in range(3):
        saved, version = step_together(policy, folder)
        report = sync.sync_weights()
        assert (report.weight_version, report.rollout_workers) == (version, 2)
        received.append(report.received_bytes)
        assert ray.get(engine.refit_state.remote()) == Serving(version)
        assert ray.get(engine.weight_version.remote()) == version
        (answer,) = ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
        assert is_answer_of(saved, answer, version)
    ray.get(policy[0].break_after.remote(5))
    with pytest.raises(ArithmeticError):
        sync.sync_weights()
    assert isinstance(ray.get(engine.refit_state.remote()), Poisoned)
    with pytest.raises(EngineNotServing):
        ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
    ray.get(policy[0].break_after.remote(None))
    received += [sync.sync_weights().received_bytes for _ in range(2)]
    assert isinstance(ray.get(engine.refit_state.remote()), Serving)
    ray.kill(engine)
    return received


def step_together(policy: Sequence[Any], folder: Path) -> tuple[str, int]:
    """Moves every policy worker one step; their weights' folder, and their version."""
    saved, version = saved_step(policy[0], folder)
    assert ray.get([worker.step.remote() for worker in policy[1:]]) == [version] * len(policy[1:])
    return saved, version
