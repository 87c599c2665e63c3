"""`rollsync.shell.refit` in someone else's program: a sync, and an engine of one's own."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import assert_type

import torch

from rollsync.pure.refit import TensorSpec
from rollsync.shell.errors import RollsyncError
from rollsync.shell.refit import (
    CheckpointEngine,
    CheckpointEngineWeightSynchronizer,
    WeightSynchronizer,
    create_checkpoint_engine,
)
from rollsync.shell.refit.engines.conformance import EngineConformance
from rollsync.shell.refit.errors import EngineNotServing, RefitError, WeightTransferFailed
from rollsync.shell.refit.policy_worker import PolicyRefitMixin
from rollsync.shell.refit.report import SyncReport
from rollsync.shell.refit.worker_group import GenerationGroup, PolicyGroup


def sync(policy: PolicyGroup, generation: GenerationGroup) -> int | None:
    synchronizer = CheckpointEngineWeightSynchronizer(
        policy,
        generation,
        {"backend": "shm", "update_weights_bucket_memory_ratio": 0.01, "engine_kwargs": {}},
    )
    loop: WeightSynchronizer = synchronizer
    assert_type(loop.is_stale, bool)
    synchronizer.init_communicator()
    report = synchronizer.sync_weights()
    assert_type(report, SyncReport)
    assert_type(report.gigabytes_per_s, float)
    return report.weight_version


def words(error: RefitError) -> str:
    # One clause catches the family.
    caught: RollsyncError = error
    if isinstance(error, EngineNotServing):
        assert_type(error.state, str)
    if isinstance(error, WeightTransferFailed):
        assert_type(error.backend, str)
    return caught.message


def mistakes(policy: PolicyGroup, generation: GenerationGroup) -> None:
    # The trainer comes first.
    CheckpointEngineWeightSynchronizer(
        generation,  # type: ignore[arg-type]
        policy,  # type: ignore[arg-type]
        {"backend": "shm", "update_weights_bucket_memory_ratio": 0.01, "engine_kwargs": {}},
    )
    # A configuration says how large the buckets are.
    CheckpointEngineWeightSynchronizer(
        policy,
        generation,
        {"backend": "shm", "engine_kwargs": {}},  # type: ignore[typeddict-item]
    )
    # The size of a bucket is in bytes, and has to be named.
    create_checkpoint_engine("shm", 1 << 20, {})  # type: ignore[call-arg]
    # The contract alone is no engine.
    CheckpointEngine(1 << 20)  # type: ignore[abstract]


class Trainer(PolicyRefitMixin):
    """A policy worker says which weights it sends, and at which version it is."""

    def weight_version(self) -> int:
        return 1

    def iter_refit_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(2)

    def prepare_refit_info(self) -> Mapping[str, TensorSpec]:
        return {"w": TensorSpec("w", (2,), "float32")}


class Nameless(PolicyRefitMixin):
    # Every weight comes with its name.
    def iter_refit_weights(self) -> Iterable[torch.Tensor]:  # type: ignore[override]
        yield torch.zeros(2)


class OwnEngine(CheckpointEngine):
    """A plug-in has the whole contract."""

    def __init__(self, *, bucket_size: int, **engine_kwargs: object) -> None:
        self.bucket_size = bucket_size

    def prepare(self) -> dict[str, object]:
        return {}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None: ...

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None: ...

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    async def receive_weight_batches(
        self,
    ) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        yield []

    def finalize(self) -> None: ...


engine: CheckpointEngine = OwnEngine(bucket_size=1 << 20)
assert_type(
    create_checkpoint_engine("nixl", bucket_size_bytes=1 << 20, engine_kwargs={}),
    CheckpointEngine,
)


class TestOwnEngine(EngineConformance):
    backend = "someone:OwnEngine"


class TestNoEngine(EngineConformance):
    # An engine is named, so that every process can make its own.
    backend = OwnEngine  # type: ignore[assignment]
