"""Every event that may change a `RolloutState`, as a value.

An event says what happened, with all that the decision needs (clock readings and random ids are
the shell's to bring). `transitions.apply` says what follows from it. Each *transfer of ownership*
is one event, so that no crash can fall between its two halves.

Events of which a resume may plan 100,000 have `gc=False`, as the state's records have.
"""

from __future__ import annotations

from msgspec import Struct

from rollsync.pure.rollout.state import (
    DataloaderState,
    DropReason,
    FinalizedReward,
    PromptReference,
    RecoveryGranularity,
)


class BatchReserved(Struct, frozen=True, kw_only=True, tag=True):
    """The dataloader handed out `prompts`; the ledger records them as reserved groups."""

    prompts: tuple[PromptReference, ...]
    dataloader_after: DataloaderState
    granularity: RecoveryGranularity
    expected_generations: int


class ReserveFilled(Struct, frozen=True, kw_only=True, tag=True):
    """The dataloader handed out `prompts` as spares for the replacement reserve."""

    prompts: tuple[PromptReference, ...]
    dataloader_after: DataloaderState


class ReserveDrawn(Struct, frozen=True, kw_only=True, tag=True):
    """The first `count` prompts of the replacement reserve become reserved groups: there is
    nothing else to hand out, or a resume had put them there."""

    count: int
    granularity: RecoveryGranularity
    expected_generations: int


class BatchAdmitted(Struct, frozen=True, kw_only=True, tag=True):
    """The sampler's cursor moved to `dispatch_index` and the reserved groups are admitted.

    The admission id follows from the dispatch index (`admission_id_of`).
    """

    group_ids: tuple[str, ...]
    dispatch_index: int
    target_step: int | None
    start_weight_version: int
    shortfall: int = 0
    """Groups that the batch lacks from the start, because the data ran out."""


class AttemptDispatched(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """A sibling's next attempt was sent to an engine."""

    group_id: str
    sibling_index: int
    attempt_index: int


class SiblingSealed(Struct, frozen=True, kw_only=True, tag=True):
    """An attempt ended well and its rows are staged in the data plane."""

    group_id: str
    sibling_index: int
    attempt_index: int
    receipt: str
    reward: float
    masked: bool
    staged_keys: tuple[str, ...]


class AttemptFailed(Struct, frozen=True, kw_only=True, tag=True):
    """An attempt ended in an error that a further attempt may not meet."""

    group_id: str
    sibling_index: int
    attempt_index: int


class AttemptAbandoned(Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for the attempt any more (an abort, a restart)."""

    group_id: str
    sibling_index: int
    attempt_index: int


class FinalizationStarted(Struct, frozen=True, kw_only=True, tag=True):
    """Rewards and rows of a fully sealed group are being turned into replay rows."""

    group_id: str


class FinalizationFailed(Struct, frozen=True, kw_only=True, tag=True):
    """The finalization ended; `outcome_known` is False when it may or may not have published."""

    group_id: str
    outcome_known: bool


class GroupCommitted(Struct, frozen=True, kw_only=True, tag=True):
    """The group's rows are published: indexed in the replay and discarded from the ledger."""

    group_id: str
    sample_ids: tuple[str, ...]
    end_weight_version: int
    lengths: tuple[int, ...]
    metrics: tuple[tuple[str, float], ...] = ()
    rewards: tuple[FinalizedReward, ...] = ()


class GroupsClaimed(Struct, frozen=True, kw_only=True, tag=True):
    """The open training step takes these groups."""

    step: int
    group_ids: tuple[str, ...]


class ClaimsReleased(Struct, frozen=True, kw_only=True, tag=True):
    """The open training step gave its groups back untrained."""

    step: int


class OptimizerCommitOpened(Struct, frozen=True, kw_only=True, tag=True):
    """The optimizer is about to change the weights: until the step is committed, no saving."""

    step: int


class StepCommitted(Struct, frozen=True, kw_only=True, tag=True):
    """The optimizer step is done: claims are trained, counters advance, the window closes."""

    step: int
    trainer_version: int


class GroupDropped(Struct, frozen=True, kw_only=True, tag=True):
    """An unfinished or ready group will not be trained; its rows become garbage.

    With a prompt in the replacement reserve, its first prompt takes the group's place (with the
    group's phase, admission and target step); without one, a shortfall is recorded.
    """

    group_id: str
    reason: DropReason
    start_weight_version: int
    """Weight version served now: that of the replacement, if there is one."""
    shortfall_step: int | None
    """Target step that will lack a group if nothing replaces this one. None for a reserved group
    (no batch counts it yet) and under a policy that oversamples. The sampler decides."""


class GroupReturnedToReserve(Struct, frozen=True, kw_only=True, tag=True):
    """A reserved group, not yet admitted, goes back into the replacement reserve."""

    group_id: str


class RowsCleared(Struct, frozen=True, kw_only=True, tag=True):
    """The data plane has cleared these rows."""

    keys: tuple[str, ...]


class RecoveryRedispatched(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """A resume took up an unfinished group: running attempts are abandoned (sealed ones too, when
    the group restarts whole); if any was running, the group's recovery count grows.
    """

    group_id: str
    restart_whole: bool


class ReadyGroupReopened(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """A ready group is generated again, in its batch: its rows were not loaded by a resume."""

    group_id: str


class CanonicalDuplicateDiscarded(Struct, frozen=True, kw_only=True, tag=True):
    """A resume found the group unfinished and also ready or with an outcome: the ledger forgets."""

    group_id: str


class NemoGymTaskIndexAdvanced(Struct, frozen=True, kw_only=True, tag=True):
    """The environment backend handed out task indices up to (not including) `next_index`."""

    next_index: int


RolloutEvent = (
    BatchReserved
    | ReserveFilled
    | ReserveDrawn
    | BatchAdmitted
    | AttemptDispatched
    | SiblingSealed
    | AttemptFailed
    | AttemptAbandoned
    | FinalizationStarted
    | FinalizationFailed
    | GroupCommitted
    | GroupsClaimed
    | ClaimsReleased
    | OptimizerCommitOpened
    | StepCommitted
    | GroupDropped
    | GroupReturnedToReserve
    | RowsCleared
    | RecoveryRedispatched
    | ReadyGroupReopened
    | CanonicalDuplicateDiscarded
    | NemoGymTaskIndexAdvanced
)
