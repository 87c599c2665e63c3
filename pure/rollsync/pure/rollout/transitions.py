"""The one way in which a `RolloutState` changes: `apply(state, event)`.

`apply` is total: it gives the next state, or a value that says why the event is illegal, and never
raises. An event costs O(k log n), where k is the number of groups, prompts or rows it names: no
event looks at all groups. Legal events keep every rule of `invariants.check_invariants`.

The table. A group's place is written `phase/status`; "attempt" is the sibling's last one.

event                        needs                                effect
---------------------------  -----------------------------------  ---------------------------------
BatchReserved                prompts go on where the dataloader   + groups reserved/generating;
                             stopped; ids new                     the epoch is the dataloader's
ReserveFilled                the same                             + prompts at the reserve's end
ReserveDrawn                 that many prompts in the reserve     reserve -> reserved/generating
BatchAdmitted                all reserved; next dispatch index;   -> admitted; cursor + 1;
                             the policy's stamp                   shortfall of the step noted
GroupReturnedToReserve       reserved                             -> the reserve's end
AttemptDispatched            admitted/generating, reserved        attempt -> dispatched
                             attempt, or next after an ended one
SiblingSealed                attempt dispatched                   attempt -> sealed; last sibling:
                             (sealed with the same data: no-op)   group -> ready_to_finalize
AttemptFailed                attempt dispatched                   attempt -> failed
AttemptAbandoned             attempt dispatched                   attempt -> abandoned
FinalizationStarted          admitted/ready_to_finalize           -> finalizing
FinalizationFailed           finalizing or finalization_unknown   -> ready_to_finalize or unknown
GroupCommitted               finalizing or finalization_unknown   ledger -> replay; staged rows
                                                                  that it does not use -> to clear
GroupsClaimed                no open step; ready; the next step;  step opens and holds the groups
                             stamped groups: their target step
ClaimsReleased               that step open, window closed        step closes, groups ready again
OptimizerCommitOpened        that step open, window closed        window opens
StepCommitted                that step open, window open;         groups trained, rows to clear;
                             version + 1                          step and version + 1; step closes
GroupDropped                 not finalizing, or ready             outcome noted; rows to clear;
                             and not claimed                      replacement, or shortfall
RowsCleared                  all of them waiting to be cleared    forgotten
RecoveryRedispatched         generating or ready_to_finalize      running attempts abandoned and
                                                                  reserved anew; recoveries counted
ReadyGroupReopened           ready and not claimed                replay -> admitted/generating
CanonicalDuplicateDiscarded  unfinished *and* ready or with an    the ledger forgets it
                             outcome
NemoGymTaskIndexAdvanced     not backwards                        index noted
"""

from __future__ import annotations

from typing import assert_never

from returns.result import Failure, Result, Success

from rollsync.pure.rollout import _attempts, _finalization, _hand_out, _removal, _training_step
from rollsync.pure.rollout.errors import TransitionError
from rollsync.pure.rollout.events import (
    AttemptAbandoned,
    AttemptDispatched,
    AttemptFailed,
    BatchAdmitted,
    BatchReserved,
    CanonicalDuplicateDiscarded,
    ClaimsReleased,
    FinalizationFailed,
    FinalizationStarted,
    GroupCommitted,
    GroupDropped,
    GroupReturnedToReserve,
    GroupsClaimed,
    NemoGymTaskIndexAdvanced,
    OptimizerCommitOpened,
    ReadyGroupReopened,
    RecoveryRedispatched,
    ReserveDrawn,
    ReserveFilled,
    RolloutEvent,
    RowsCleared,
    SiblingSealed,
    StepCommitted,
)
from rollsync.pure.rollout.state import RolloutState


def apply(state: RolloutState, event: RolloutEvent) -> Result[RolloutState, TransitionError]:
    """The state after `event`, or why the event is illegal in `state`."""
    after = _next(state, event)
    return Success(after) if isinstance(after, RolloutState) else Failure(after)


def _next(state: RolloutState, event: RolloutEvent) -> RolloutState | TransitionError:
    match event:
        case AttemptDispatched():
            return _attempts.dispatched(state, event)
        case SiblingSealed():
            return _attempts.sealed(state, event)
        case AttemptFailed() | AttemptAbandoned():
            return _attempts.ended(state, event)
        case RecoveryRedispatched():
            return _attempts.redispatched(state, event)
        case BatchReserved():
            return _hand_out.batch_reserved(state, event)
        case ReserveFilled():
            return _hand_out.reserve_filled(state, event)
        case ReserveDrawn():
            return _hand_out.reserve_drawn(state, event)
        case BatchAdmitted():
            return _hand_out.batch_admitted(state, event)
        case GroupReturnedToReserve():
            return _hand_out.returned_to_reserve(state, event)
        case NemoGymTaskIndexAdvanced():
            return _hand_out.task_index_advanced(state, event)
        case FinalizationStarted():
            return _finalization.started(state, event)
        case FinalizationFailed():
            return _finalization.failed(state, event)
        case GroupCommitted():
            return _finalization.committed(state, event)
        case GroupsClaimed():
            return _training_step.claimed(state, event)
        case ClaimsReleased():
            return _training_step.released(state, event)
        case OptimizerCommitOpened():
            return _training_step.commit_opened(state, event)
        case StepCommitted():
            return _training_step.committed(state, event)
        case GroupDropped():
            return _removal.dropped(state, event)
        case RowsCleared():
            return _removal.rows_cleared(state, event)
        case ReadyGroupReopened():
            return _removal.reopened(state, event)
        case CanonicalDuplicateDiscarded():
            return _removal.duplicate_discarded(state, event)
        case _:
            assert_never(event)
