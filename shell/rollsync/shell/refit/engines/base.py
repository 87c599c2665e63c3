"""The contract between a refit and the transport that carries its weights.

It is NeMo-RL's, so that an engine written for one runs in the other. Rule kept here: an engine is
named, and imported when it is needed: a built-in by its short name, any other as `module:Class`.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Final

import torch

from rollsync.shell.refit.errors import RefitConfigurationError

BUILT_IN: Final[Mapping[str, str]] = {
    "shm": "rollsync.shell.refit.engines.shm:ShmCheckpointEngine",
    "nixl": "rollsync.shell.refit.engines.nixl:NixlCheckpointEngine",
}
"""The engines that have a short name."""


class CheckpointEngine(ABC):
    """One worker's end of a transport for weights.

    Args:
        bucket_size: bytes of one transfer buffer.
        engine_kwargs: the backend's options.
    """

    shard_expert_weights: bool = False
    """Whether the policy sends each rollout rank only the experts that it holds."""

    @abstractmethod
    def __init__(self, bucket_size: int, **engine_kwargs: object) -> None: ...

    @abstractmethod
    def prepare(self) -> object:
        """Reserves the buffers; answers what the peers need to connect."""

    def get_target_weight_layout(self) -> object:
        """On a policy worker, what its rollout peer holds; None without a peer."""
        return None

    @abstractmethod
    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[object],
    ) -> None:
        """Connects a policy worker; `metadata` is every worker's, policy workers first."""

    @abstractmethod
    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[object],
    ) -> None:
        """Connects a rollout worker; `metadata` is every worker's, policy workers first."""

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Sends one stream; the generator is consumed once, to its end."""

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yields one stream's weights; a batch is valid until the next is asked for."""

    @abstractmethod
    def finalize(self) -> None:
        """Gives back what `prepare` reserved, as far as the options say so."""


def create_checkpoint_engine(
    backend: str, *, bucket_size_bytes: int, engine_kwargs: Mapping[str, object]
) -> CheckpointEngine:
    """Makes an engine.

    Args:
        backend: a name of `BUILT_IN`, or `module:ClassName`.
        bucket_size_bytes: bytes of one transfer buffer.
        engine_kwargs: the backend's options.

    Raises:
        RefitConfigurationError: when there is no such engine.
    """
    module_name, _, class_name = BUILT_IN.get(backend, backend).partition(":")
    try:
        engine_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RefitConfigurationError(
            f"there is no checkpoint engine {backend!r}: {error}",
            remedy=f"name one of {', '.join(BUILT_IN)} or module:ClassName",
        ) from error
    engine: CheckpointEngine = engine_class(bucket_size_bytes, **engine_kwargs)
    return engine
