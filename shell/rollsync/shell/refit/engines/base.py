"""The contract of a checkpoint engine: how one worker's weights reach other workers.

It is the reference's plug-in contract (NeMo-RL, and verl's before it), so that an engine written
for one runs in the other. The life of an engine: made with a bucket size, `prepare` (its metadata
goes to every worker), one of the two `init_*_process_group`, then a stream at a time, `finalize`;
after that it may be prepared again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import ClassVar

import torch

from rollsync.pure.refit import EngineChoice, TensorSpec
from rollsync.pure.refit.layout import Part

Weights = Iterable[tuple[str, torch.Tensor]]
"""A stream: name and tensor, in the order in which they are sent. Consumed once."""

Batch = list[tuple[str, torch.Tensor]]
"""Received tensors, whole. They are valid until the next batch is asked for."""


class CheckpointEngine(ABC):
    """Moves streams of weights from policy workers to rollout workers.

    Args:
        bucket_size: bytes of one transfer buffer; a worker has two. Given by keyword.
        engine_kwargs: the backend's own options.
    """

    shard_expert_weights: ClassVar[bool] = False
    """Of the plug-in contract: whether the rollout workers are to tell where their experts lie, and
    the policy workers to send no others. NeMo-RL's workers do so; rollsync's refuse an engine that
    sets it, as they go by `DeclaringEngine`."""

    @abstractmethod
    def __init__(self, bucket_size: int, **engine_kwargs: object) -> None: ...

    @abstractmethod
    def prepare(self) -> dict[str, object]:
        """Get ready to be reached; the metadata by which other workers do so. What streams need
        may be reserved here, or in the process group, where it is known what this worker does."""

    def get_target_weight_layout(self) -> object:
        """What a rollout worker keeps of the experts; None: all of them. Of the plug-in contract:
        NeMo-RL's policy workers ask for it, and rollsync's do not."""
        return None

    @abstractmethod
    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None:
        """Learn where the rollout workers are.

        Args:
            worker_rank: this policy worker's rank.
            metadata: what every worker's `prepare` answered, policy workers first.
        """

    @abstractmethod
    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None:
        """Learn where the policy workers are. `rollout_rank` is among all rollout workers."""

    @abstractmethod
    async def send_weights(self, weights: Weights) -> None:
        """Send one stream. `weights` is consumed to its end also by a worker that feeds nobody."""

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[Batch, None]:
        """Receive one stream. A batch is released when the next one is asked for, so whoever loads
        it has to be done with it by then, on the device too."""

    @abstractmethod
    def finalize(self) -> None:
        """Give back everything that was reserved since `prepare`."""


class DeclaringEngine(CheckpointEngine):
    """An engine whose ends compare what is declared of a stream before its first byte, and which
    sends a rollout worker only the parts that it keeps. A plug-in need not be one."""

    @abstractmethod
    def declare_weights(self, declared: Sequence[TensorSpec] | None) -> None:
        """Take what streams will hold, in their order, on either side; None: that is not known."""

    @abstractmethod
    def set_target_weight_layout(self, layout: Sequence[Part] | None) -> None:
        """Take what part of each declared tensor this rollout worker keeps; None: all of it."""

    @property
    @abstractmethod
    def comes_in_parts(self) -> bool:
        """Whether the stream that is being received carries the parts of this worker's layout,
        each under `part_name`, and no whole declared tensor; known with its first batch."""


class CountingEngine(CheckpointEngine):
    """An engine that counts a stream's buckets. A plug-in need not be one."""

    @property
    @abstractmethod
    def buckets(self) -> int | None:
        """How many buckets the last stream was cut into that this rollout worker received to its
        end; None before the first."""


class RoutingEngine(CheckpointEngine):
    """An engine that carries each of its routes as it finds best. A plug-in need not be one."""

    @property
    @abstractmethod
    def choices(self) -> tuple[EngineChoice, ...]:
        """What carries each of this worker's routes; none before its process group is set up."""
