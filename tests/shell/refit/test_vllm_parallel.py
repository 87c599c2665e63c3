"""Synchronous engines of two ranks, which share a model with tied embeddings: by slices of its
weights, or by its layers."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from rollsync.pure.refit.lifecycle import Closed, Poisoned, Serving
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.errors import EngineNotServing, EngineStepFailed
from rollsync.shell.refit.report import SyncReport
from rollsync.shell.refit.torch_generation import TorchGenerationWorker
from rollsync.shell.refit.worker_group import GenerationGroup
from tests.shell.refit.tiny_models import make_model, save_model
from tests.shell.refit.vllm_engines import (
    GREEDY,
    PACKED,
    PLAIN_WORKER,
    PROMPT,
    TELLS_PIDS,
    KillingPolicy,
    RankedEngine,
    is_answer_of,
    saved_step,
    synchronizer,
    vllm_actor,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 8000
"""So many rows divide by two ranks without padding. The embeddings, which come first, are 2 MB: a
rank reads them directly while the policy worker makes what comes after them."""
RANKS = 2
STAGES: Mapping[str, Any] = {
    "pipeline_parallel_size": RANKS,
    "enforce_eager": False,
    "compilation_config": {"mode": 1},
    "max_num_batched_tokens": 128,
}
"""On a processor, vLLM 0.32 makes a later stage's buffer for what comes from the stage before in a
warm-up that it leaves out of an eager engine, which then fails at its first request. So this one is
not eager by name; its environment has torch compile nothing."""
NOT_EAGER = {
    "TORCH_COMPILE_DISABLE": "0",
    "TORCHDYNAMO_DISABLE": "1",
    # vLLM hears of an error of its last stage only, and waits this long when another refuses.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30",
}


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    """Bytes of the model's weights, by name."""
    model = make_model(tied=True, vocabulary=VOCABULARY)
    return {name: tensor.nbytes for name, tensor in model.named_parameters()}


class Refit:
    """An engine, or another in its place, and policy workers that move in step.

    Args:
        folder: for the models.
        policy_workers: how many send.
    """

    def __init__(self, folder: Path, *, policy_workers: int) -> None:
        self.folder = folder
        self.start = save_model(folder / "start", tied=True, vocabulary=VOCABULARY)
        made: Any = ray.remote(KillingPolicy).options(num_cpus=0)
        self.policy: list[Any] = [
            made.remote(tied=True, rank=rank, vocabulary=VOCABULARY)
            for rank in range(policy_workers)
        ]
        self.engine: Any = None

    def connect(
        self, backend: str = "shm", *, ranks: int = RANKS, **options: Any
    ) -> CheckpointEngineWeightSynchronizer:
        """Connects all to the engine, which is synchronous if it has several ranks."""
        group = GenerationGroup([self.engine], ranks_per_engine=ranks, async_engine=ranks == 1)
        sync = synchronizer(self.policy, group, backend, bucket_mebibytes=1, **options)
        sync.init_communicator()
        return sync

    def serve_next(self, sync: CheckpointEngineWeightSynchronizer) -> SyncReport:
        """Has the engine serve the next version, as a fresh one would."""
        saved, version = saved_step(self.policy[0], self.folder)
        others = [worker.step.remote() for worker in self.policy[1:]]
        assert ray.get(others) == [version] * len(others)
        report = sync.sync_weights()
        assert report.weight_version == version
        assert ray.get(self.engine.refit_state.remote()) == Serving(version)
        assert ray.get(self.engine.weight_version.remote()) == version
        (answer,) = ray.get(self.engine.generate.remote(PROMPT, GREEDY, seed=11))
        assert is_answer_of(saved, answer, version)
        return report

    def break_one(self, sync: CheckpointEngineWeightSynchronizer) -> None:
        """Lets the first policy worker fail in the middle of a sync: nobody is answered then."""
        ray.get(self.policy[0].break_after.remote(5))
        with pytest.raises(ArithmeticError):
            sync.sync_weights()
        assert isinstance(ray.get(self.engine.refit_state.remote()), Poisoned)
        self.check_refusal()
        ray.get(self.policy[0].break_after.remote(None))

    def check_refusal(self) -> None:
        """The engine answers no request."""
        with pytest.raises(EngineNotServing):
            ray.get(self.engine.generate.remote(PROMPT, GREEDY, seed=11))


@pytest.mark.usefixtures("cluster")
def test_two_ranks_of_an_engine_take_their_slices_of_tied_weights(
    tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    refit = Refit(tmp_path, policy_workers=1)
    refit.engine = vllm_actor(
        RankedEngine,
        refit.start,
        env=TELLS_PIDS,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
        worker_cls=PLAIN_WORKER,
    )
    whole_bytes = sum(sizes.values())
    halved_bytes = sum(size for name, size in sizes.items() if not name.endswith("norm.weight"))
    part_bytes = whole_bytes - halved_bytes // 2
    packed_bytes = sum(size for name, size in sizes.items() if PACKED in name) // 2

    def came(part: bool, direct: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        received = part_bytes if part else whole_bytes
        return (received,) * RANKS, (received - packed_bytes if direct else 0,) * RANKS

    def serve(sync: CheckpointEngineWeightSynchronizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        report = refit.serve_next(sync)
        return report.received_bytes, report.direct_bytes

    sync = refit.connect()
    refit.check_refusal()
    # The first sync is whole; in those after it a rank gets what it keeps.
    assert [serve(sync) for _ in range(3)] == [came(part=False), came(part=True), came(part=True)]
    refit.break_one(sync)
    assert [serve(sync) for _ in range(2)] == [came(part=False), came(part=True)]
    sync.shutdown()
    # What vLLM does not pack is read where it lies.
    for backend in ("shm", "nixl"):
        sync = refit.connect(backend, direct=True)
        assert [serve(sync) for _ in range(2)] == [came(part=True, direct=True)] * 2
        refit.break_one(sync)
        assert [serve(sync) for _ in range(2)] == [came(part=False), came(part=True, direct=True)]
        sync.shutdown()
    sync = refit.connect(direct=True)
    (policy,) = refit.policy
    _, second = ray.get(refit.engine.pids.remote())
    ray.get(policy.kill_at_the_last_weight.remote(second))
    with pytest.raises(EngineStepFailed, match="vLLM's processes have ended"):
        sync.sync_weights()
    assert ray.get(refit.engine.refit_state.remote()) == Closed()
    refit.check_refusal()
    ray.kill(refit.engine)
    # What takes its place is read into as well, once its loader is known.
    ray.get(policy.kill_at_the_last_weight.remote(None))
    refit.engine = ray.remote(TorchGenerationWorker).options(num_cpus=0).remote(refit.start)
    sync = refit.connect(ranks=1, direct=True)
    assert [serve(sync) for _ in range(2)] == [((whole_bytes,), (0,)), ((whole_bytes,),) * 2]


@pytest.mark.usefixtures("cluster")
def test_two_stages_of_an_engine_take_their_layers_each_from_its_policy_worker(
    tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    refit = Refit(tmp_path, policy_workers=RANKS)
    refit.engine = vllm_actor(
        RankedEngine,
        refit.start,
        env={**NOT_EAGER, **TELLS_PIDS},
        distributed_executor_backend="mp",
        **STAGES,
    )
    ranks = ray.get(refit.engine.pids.remote())
    sync = refit.connect()
    refit.check_refusal()
    received = [refit.serve_next(sync).received_bytes for _ in range(3)]
    refit.break_one(sync)
    received += [refit.serve_next(sync).received_bytes for _ in range(2)]
    whole_bytes = sum(sizes.values())
    # The last stage's head is tied to the embeddings, which are the first stage's.
    stages = (("embed_tokens", "layers.0"), ("embed_tokens", "layers.1", "norm"))
    kept = tuple(
        sum(sizes[name] for name in sizes if name.removeprefix("model.").startswith(stage))
        for stage in stages
    )
    # The stream that broke was the first stage's only.
    whole = (whole_bytes, whole_bytes)
    assert received == [whole, kept, kept, (whole_bytes, kept[1]), kept]
    # And the first stage is enough to stop vLLM itself.
    assert ray.get(refit.engine.refusal_of_vllm.remote()) == ""
    refit.break_one(sync)
    assert ray.get(refit.engine.refusal_of_vllm.remote()) == "EngineDeadError"
    ray.kill(refit.engine)
    # vLLM leaves the second stage behind, which asks for the first one's word without a rest.
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
