"""Two synchronous engines of two tensor-parallel ranks each: those of the first relay to those of
the second what both keep."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rollsync.pure.refit.lifecycle import Closed, Poisoned, Serving
from rollsync.shell.refit.engines.metadata import HOST_LABEL
from rollsync.shell.refit.errors import EngineNotServing, EngineStepFailed
from rollsync.shell.refit.worker_group import GenerationGroup
from tests.shell.refit.tiny_models import save_model
from tests.shell.refit.vllm_engines import (
    GREEDY,
    PROMPT,
    TELLS_PIDS,
    KillingPolicy,
    RankedEngine,
    is_answer_of,
    saved_step,
    synchronizer,
    vllm_actor,
)

VOCABULARY = 8000
"""Embeddings of 2 MB, of which a rank's half fills more than one small bucket."""
RANKS = 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_ranks_relay_what_they_keep_to_the_same_rank_of_the_next_engine(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", tied=True, vocabulary=VOCABULARY)
    # As far as the workers can tell, both engines are on a host that the policy worker is not on.
    env = {HOST_LABEL: "elsewhere", **TELLS_PIDS}
    parallel = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
    first, last = (vllm_actor(RankedEngine, start, env=env, **parallel) for _ in range(2))
    policy: Any = (
        ray.remote(KillingPolicy).options(num_cpus=0).remote(tied=True, vocabulary=VOCABULARY)
    )
    settings: dict[str, Any] = {"relay": True, "refit_timeout_s": 10_000}
    both = GenerationGroup([first, last], ranks_per_engine=RANKS, async_engine=False)
    sync = synchronizer(policy, both, "auto", bucket_mebibytes=1, **settings)
    sync.init_communicator()
    received: list[tuple[int, ...]] = []
    for _ in range(2):
        saved, version = saved_step(policy, tmp_path)
        report = sync.sync_weights()
        received.append(report.received_bytes)
        assert [str(choice).partition(":")[0] for choice in report.choices] == [
            "policy 0 to rollout 0 by nixl",
            "policy 0 to rollout 1 by nixl",
            "rollout 0 to rollout 2 by shm",
            "rollout 1 to rollout 3 by shm",
        ]
        for engine in (first, last):
            check_answer(engine, saved, version)
    # What is relayed is whole at first, and then what both ranks keep.
    whole_bytes = received[0][0]
    assert received[0] == (whole_bytes,) * 4
    assert received[1][:RANKS] == received[1][RANKS:]
    assert all(part < 0.52 * whole_bytes for part in received[1])

    relaying, *_ = ray.get(first.pids.remote())
    ray.get(policy.kill_at_the_last_weight.remote(relaying))
    with pytest.raises(EngineStepFailed, match="vLLM's processes have ended") as raised:
        sync.sync_weights()
    told = [note for note in raised.value.__notes__ if "rollout 0 is gone" in note]
    assert any("policy 0, while it waited" in note for note in told)
    assert any("rollout 2, while it waited" in note for note in told)
    assert ray.get(first.refit_state.remote()) == Closed()
    assert isinstance(ray.get(last.refit_state.remote()), Poisoned)
    for engine in (first, last):
        with pytest.raises(EngineNotServing):
            ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
    ray.kill(first)

    ray.get(policy.kill_at_the_last_weight.remote(None))
    left = GenerationGroup([last], ranks_per_engine=RANKS, async_engine=False)
    again = synchronizer(policy, left, "auto", bucket_mebibytes=1, **settings)
    again.reconnect()
    saved, version = saved_step(policy, tmp_path)
    again.sync_weights()
    check_answer(last, saved, version)

    # vLLM's own calls would wait for ever for what is killed here.
    _, rank = ray.get(last.pids.remote())
    core = psutil.Process(rank).parent()
    assert core is not None
    core.kill()
    with pytest.raises(EngineStepFailed, match="vLLM's processes have ended"):
        again.sync_weights()
    assert ray.get(last.refit_state.remote()) == Closed()
    ray.kill(last)


def check_answer(engine: Any, saved: str, version: int) -> None:
    """The engine answers with the saved weights."""
    assert ray.get(engine.refit_state.remote()) == Serving(version)
    (answer,) = ray.get(engine.generate.remote(PROMPT, GREEDY, seed=11))
    assert is_answer_of(saved, answer, version)
