"""What a sampler answers, as values: the shell carries them out and asks again.

An answer that changes the state carries the event to apply, so that the shell never builds one.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from rollsync.pure.rollout.events import BatchAdmitted, GroupsClaimed, ReserveDrawn
from rollsync.pure.rollout.state import RecoveryGranularity


class SamplerLimits(Struct, frozen=True, kw_only=True):
    """What a sampler must know beside its own settings and the state."""

    num_prompts_per_step: int
    """Groups in a whole batch."""
    num_generations_per_prompt: int
    """Siblings in a group."""
    granularity: RecoveryGranularity
    buffer_capacity: int | None
    """Most groups that may be admitted and untrained; None: no limit."""
    prompts_left: bool
    """Whether the dataloader can hand out more."""
    served_weight_version: int
    """Weight version that the engines serve now."""


class WaitReason(StrEnum):
    """What has to happen before the same question can have another answer."""

    LOOKAHEAD = "lookahead"
    """Generation is as far ahead of the trainer as the policy allows: a step must commit."""
    CAPACITY = "capacity"
    """The buffer has no room for a batch: groups must be trained or dropped."""
    WEIGHTS = "weights"
    """The engines serve weights that are too old already: they must be synced first."""
    UNFINISHED = "unfinished"
    """Groups that the batch needs are still being generated."""
    NOT_ADMITTED = "not_admitted"
    """Groups that the batch needs have not been admitted yet."""
    STEP_OPEN = "step_open"
    """The open training step must commit or be released first."""


class AdmitBatch(Struct, frozen=True, kw_only=True, tag=True):
    """Apply `event`, then dispatch the groups that it names."""

    event: BatchAdmitted


class PullPrompts(Struct, frozen=True, kw_only=True, tag=True):
    """Take up to `count` prompts from the dataloader, apply `BatchReserved`, and ask again."""

    count: int


class DrawReserve(Struct, frozen=True, kw_only=True, tag=True):
    """The data has ended: apply `event`, which turns spares into reserved groups, and ask again."""

    event: ReserveDrawn


class NothingToAdmit(Struct, frozen=True, kw_only=True, tag=True):
    """Every prompt is handed out and admitted."""


class Wait(Struct, frozen=True, kw_only=True, tag=True):
    """Nothing to do until the state changes."""

    reason: WaitReason


Admission = AdmitBatch | PullPrompts | DrawReserve | NothingToAdmit | Wait


class TrainBatch(Struct, frozen=True, kw_only=True, tag=True):
    """Apply `event` and train the groups that it claims, in that order."""

    event: GroupsClaimed


class SkipStep(Struct, frozen=True, kw_only=True, tag=True):
    """Every group of the step's batch was dropped: apply `event`, open the commit window and
    commit the step, with no optimizer step. So the cursor of the trainer never sticks."""

    event: GroupsClaimed


class NothingLeft(Struct, frozen=True, kw_only=True, tag=True):
    """There is no group to train and none to come: the run is over."""


Selection = TrainBatch | SkipStep | NothingLeft | Wait
