"""Version 1 of the rollout state. Every array that stands for a set or a map is sorted by key."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rollsync.codecs.canonical import Finite, Integer, Natural, Wire
from rollsync.codecs.rollout.recovery_ledger import v1 as ledger

DispatchIndex = Annotated[int, Meta(ge=-1, le=2**63 - 1)]


class Progress(Wire, frozen=True, kw_only=True):
    """The trainer's counters."""

    train_steps: Natural
    trainer_version: Natural
    current_epoch: Natural


class Dataloader(Wire, frozen=True, kw_only=True):
    """Where the dataloader goes on."""

    epoch: Natural
    position: Natural
    dataset_digest: str
    seed: Integer


class Reward(Wire, frozen=True, kw_only=True):
    """The reward of one sibling."""

    sibling_index: Natural
    reward: Finite


class Runtime(Wire, frozen=True, kw_only=True):
    """What the pumps change."""

    replacement_reserve: tuple[ledger.Prompt, ...]
    """In the order of the queue, its head first."""
    batch_shortfall: tuple[tuple[Natural, Natural], ...]
    """Target step and groups that it lacks."""
    sampler_stamps_target_steps: bool
    finalizer_metrics_by_group: tuple[tuple[str, dict[str, Finite]], ...]
    finalizer_rewards_by_group: tuple[tuple[str, tuple[Reward, ...]], ...]


class ReadyGroup(Wire, frozen=True, kw_only=True):
    """A finished group that no step has trained yet."""

    group_id: str
    admission_id: str
    granularity: Literal["sibling", "prompt_group"]
    prompt: ledger.Prompt
    sample_ids: tuple[str, ...]
    start_weight_version: Natural
    end_weight_version: Natural
    target_step: Natural | None
    lengths: tuple[Natural, ...]
    rewards: tuple[Finite, ...]
    masked: tuple[bool, ...]
    commit_index: Natural


class OpenStep(Wire, frozen=True, kw_only=True):
    """The training step that has claimed groups and not yet committed."""

    step: Natural
    group_ids: tuple[str, ...]
    optimizer_commit_open: bool


class Trained(Wire, frozen=True, kw_only=True, tag="trained"):
    """The prompt was in an optimizer step."""

    step: Natural


class Dropped(Wire, frozen=True, kw_only=True, tag="dropped"):
    """The prompt will not be trained."""

    step: Natural
    reason: Literal["stale", "unrecoverable", "replaced"]


class RolloutState(Wire, frozen=True, kw_only=True):
    """Everything the run has in flight."""

    progress: Progress
    dataloader_state: Dataloader
    sampler_dispatch_index: DispatchIndex
    next_nemo_gym_task_index: Natural
    runtime: Runtime
    ledger: tuple[ledger.Group, ...]
    replay: tuple[ReadyGroup, ...]
    next_commit_index: Natural
    open_step: OpenStep | None
    rows_to_clear: tuple[str, ...]
    outcomes: tuple[tuple[str, Trained | Dropped], ...]
    """Prompt id and what became of the prompt."""
