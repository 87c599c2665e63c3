"""The objects that a weight synchronizer drives and offers, by shape and not by class.

Rule kept here: nothing is asked of a policy or generation object beyond what NeMo-RL's have, so
that either side can be somebody else's, with a checkpoint engine that both can load. Such a policy
names no weight version, and rollsync's engines count the syncs; rollsync's policy names it only to
engines that take it, which somebody else's do not.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypedDict

from ray import ObjectRef


class CheckpointEngineConfig(TypedDict):
    """Which checkpoint engine moves the weights, and through how much memory, as code gives it;
    the section of a run's file is `rollsync.pure.config.CheckpointEngineConfig`.

    `backend` is a built-in name (`shm`, `nixl`, `auto`) or `module:ClassName`;
    `update_weights_bucket_memory_ratio` lies strictly between 0 and 1; `engine_kwargs` maps a
    backend to its options, of which `release_after_refit` is also the synchronizer's.
    """

    backend: str
    update_weights_bucket_memory_ratio: float
    engine_kwargs: Mapping[str, Mapping[str, object]]


class Timer(Protocol):
    """Times the body of a `with`; NeMo-RL's `Timer` is one."""

    def time(self, label: str, /) -> AbstractContextManager[object]: ...


class WorkerGroup(Protocol):
    """Remote workers that run one method; every call answers one Ray reference per worker run."""

    @property
    def workers(self) -> Sequence[object]: ...

    def run_all_workers_single_data(
        self, method_name: str, *, run_rank_0_only_axes: Sequence[str] = ..., **kwargs: object
    ) -> list[ObjectRef[object]]: ...

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Sequence[str] = ...,
        common_kwargs: Mapping[str, object] = ...,
        **kwargs: object,
    ) -> list[ObjectRef[object]]: ...


class RefitPolicy(Protocol):
    """The trainer side: its workers answer `checkpoint_engine_rpc`."""

    @property
    def worker_group(self) -> WorkerGroup: ...

    def prepare_refit_info(self) -> object: ...


class RefitGeneration(Protocol):
    """The generation side: `worker_group.workers` has one entry per rollout rank, engine by
    engine, and `dp_size` is the number of engines."""

    @property
    def worker_group(self) -> WorkerGroup: ...

    @property
    def dp_size(self) -> int: ...

    @property
    def cfg(self) -> Mapping[str, object]: ...

    def prepare_refit_info(self, refit_info: object, /) -> object: ...


class WeightSynchronizer(ABC):
    """Brings the generation engines to the policy's weights.

    A training loop calls `init_communicator` once, `sync_weights` whenever the policy has moved,
    and `shutdown` at its end.
    """

    @abstractmethod
    def init_communicator(self) -> None:
        """Connects both sides; a second call connects anew only what was shut down."""

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the engines may serve other weights than the policy's last synchronized ones."""

    @abstractmethod
    def mark_stale(self) -> None:
        """Notes that the policy has moved: `is_stale` is True until the next sync has succeeded."""

    @abstractmethod
    def sync_weights(
        self, *, timer: Timer | None = None, kv_scales: dict[str, float] | None = None
    ) -> object:
        """Moves the policy's weights into every engine, or raises and leaves `is_stale` True."""

    @abstractmethod
    def shutdown(self) -> None:
        """Releases what a set-up acquired; does nothing when there was none."""
