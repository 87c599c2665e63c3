"""The parts of a run that saving and restoring both use, each as narrow as they need it.

Rule kept here: nothing in it decides; it only says what the two halves may ask of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.sampler import PromptGroupSampler
from rollsync.pure.rollout.state import DatumSpec, TrainingProgress
from rollsync.shell.rollout.barrier import DataPlaneCheckpointBarrier
from rollsync.shell.rollout.cell import StateCell
from rollsync.shell.rollout.data_plane import DataPlane
from rollsync.shell.rollout.environments import EnvironmentCheckpoint
from rollsync.shell.rollout.replay_buffer import TQReplayBuffer
from rollsync.shell.rollout.trace import RolloutTraceRecorder


class PromptDataset(Protocol):
    """Gives a prompt again by its sample id, as a resume needs it."""

    @property
    def digest(self) -> str:
        """Identity of the whole dataset, as `DataloaderState.dataset_digest`."""
        ...

    def lookup(self, sample_id: str) -> DatumSpec | None:
        """The prompt, or None if the dataset does not have it (any more)."""
        ...

    def content_digest(self, datum: DatumSpec) -> str:
        """As in `PromptReference.content_digest`."""
        ...


class RolloutManager(Protocol):
    """Runs the attempts. Saving and restoring only ever stop it."""

    def close_admission(self, why: str) -> None:
        """Start no further rollout: the environment does not answer any more."""
        ...


MetricsLogger = Callable[[Mapping[str, float]], None]
"""Takes metrics by name; names begin with `rollout_checkpoint/`."""


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What `RolloutSnapshotter` and `RolloutRestorer` both work with."""

    master_config: MasterConfig
    dp_client: DataPlane
    partition_id: str
    buffer: TQReplayBuffer
    dataloader: PromptDataset
    sampler: PromptGroupSampler
    rollout_manager: RolloutManager
    data_plane_barrier: DataPlaneCheckpointBarrier
    environment_checkpoint: EnvironmentCheckpoint
    runtime_state: StateCell
    """The one mutable cell."""
    read_progress: Callable[[], TrainingProgress]
    """The trainer's own counters, which the state's must equal."""
    log_metrics: MetricsLogger
    trace: RolloutTraceRecorder


class _UsesRolloutParts:
    """Unpacks the parts into the attributes that the snapshotter and the restorer read."""

    def __init__(self, parts: RolloutParts) -> None:
        self._dp_client = parts.dp_client
        self._partition_id = parts.partition_id
        self._buffer = parts.buffer
        self._dataloader = parts.dataloader
        self._sampler = parts.sampler
        self._rollout_manager = parts.rollout_manager
        self._barrier = parts.data_plane_barrier
        self._environment = parts.environment_checkpoint
        self._cell = parts.runtime_state
        self._read_progress = parts.read_progress
        self._log_metrics = parts.log_metrics
        self._trace = parts.trace
