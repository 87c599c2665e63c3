"""A synchronous engine of two tensor-parallel ranks, and a model with tied embeddings."""

import math
from pathlib import Path
from typing import Any

import pytest
import ray

from rollsync.pure.refit.lifecycle import Poisoned, Serving
from rollsync.shell.refit.errors import EngineNotServing
from rollsync.shell.refit.worker_group import GenerationGroup
from tests.shell.refit.reference import reference_answer
from tests.shell.refit.tiny_models import TinyPolicy, save_model
from tests.shell.refit.vllm_engines import GREEDY, PROMPT, saved_step, sync_engine, synchronizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 128
"""So many rows divide by two ranks without padding."""


@pytest.mark.usefixtures("cluster")
def test_two_ranks_of_an_engine_take_their_slices_of_tied_weights(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", tied=True, vocabulary=VOCABULARY)
    policy: Any = (
        ray.remote(TinyPolicy).options(num_cpus=0).remote(tied=True, vocabulary=VOCABULARY)
    )
    engine = sync_engine(start, tensor_parallel_size=2, distributed_executor_backend="mp")
    generation = GenerationGroup([engine], ranks_per_engine=2, async_engine=False)
    sync = synchronizer(policy, generation, bucket_mebibytes=1, ranks=2)
    sync.init_communicator()
    with pytest.raises(EngineNotServing):
        ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
    received: list[tuple[int, ...]] = []
    for _ in range(3):
        saved, version = saved_step(policy, tmp_path)
        report = sync.sync_weights()
        assert (report.weight_version, report.rollout_workers) == (version, 2)
        received.append(report.received_bytes)
        assert ray.get(engine.refit_state.remote()) == Serving(version)
        assert ray.get(engine.weight_version.remote()) == version
        (answer,) = ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
        (expected,) = reference_answer(saved, PROMPT, GREEDY, version)
        assert answer.token_ids == expected.token_ids
        assert all(map(_close, answer.logprobs, expected.logprobs))
    # The first sync is whole; in those after it a rank gets what it keeps: half of all but norms.
    whole_bytes = received[0][0]
    assert received[0] == (whole_bytes, whole_bytes)
    assert received[1] == received[2]
    assert all(whole_bytes / 2 <= part < 0.52 * whole_bytes for part in received[1])
    ray.get(policy.break_after.remote(5))
    with pytest.raises(ArithmeticError):
        sync.sync_weights()
    assert isinstance(ray.get(engine.refit_state.remote()), Poisoned)
    with pytest.raises(EngineNotServing):
        ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
    ray.get(policy.break_after.remote(None))
    assert [sync.sync_weights().received_bytes for _ in range(2)] == received[:2]
    ray.kill(engine)


def _close(one: float, other: float) -> bool:
    # Two ranks add in another order than one.
    return math.isclose(one, other, abs_tol=1e-4)
