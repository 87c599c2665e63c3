"""Which groups a stretch of a run has touched, and the state as far as those are concerned.

A state holds all that a run has in flight, and a save wants what came since the save before. Rule
kept here, for every event: entries of the maps by group id differ only for groups that
`touched_groups` names. So the difference of two states is that of their parts, at the cost of what
was touched, and rules that held before need be looked at again only there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TypeVar, assert_never

from msgspec.structs import replace
from rpds import HashTrieMap

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

V = TypeVar("V")


def touched_groups(before: RolloutState, event: RolloutEvent) -> tuple[str, ...]:
    """Groups whose entries may be others after `event`.

    Args:
        before: the state that the event changed.
    """
    match event:
        case BatchReserved() | ReserveFilled():
            return tuple(prompt.prompt_id for prompt in event.prompts)
        case ReserveDrawn():
            return _first_spares(before, event.count)
        case GroupDropped():
            # A spare takes its place.
            return (event.group_id, *_first_spares(before, 1))
        case BatchAdmitted() | GroupsClaimed():
            return event.group_ids
        case ClaimsReleased() | OptimizerCommitOpened() | StepCommitted():
            return claimed_groups(before)
        case (
            AttemptDispatched()
            | SiblingSealed()
            | AttemptFailed()
            | AttemptAbandoned()
            | FinalizationStarted()
            | FinalizationFailed()
            | GroupCommitted()
            | GroupReturnedToReserve()
            | RecoveryRedispatched()
            | ReadyGroupReopened()
            | CanonicalDuplicateDiscarded()
        ):
            return (event.group_id,)
        case RowsCleared() | NemoGymTaskIndexAdvanced():
            return ()
        case _:
            assert_never(event)


def part_of(state: RolloutState, group_ids: Iterable[str]) -> RolloutState:
    """The state without the groups that are not named. O(named).

    For states `a` and `b`, and at least the groups touched in between:
    `diff(part_of(a, ids), part_of(b, ids)) == diff(a, b)`.
    """
    ids = tuple(group_ids)
    runtime = state.runtime
    return replace(
        state,
        ledger=replace(state.ledger, groups=_entries(state.ledger.groups, ids)),
        replay=_entries(state.replay, ids),
        outcomes=_entries(state.outcomes, ids),
        runtime=replace(
            runtime,
            finalizer_metrics_by_group=_entries(runtime.finalizer_metrics_by_group, ids),
            finalizer_rewards_by_group=_entries(runtime.finalizer_rewards_by_group, ids),
        ),
    )


def claimed_groups(state: RolloutState) -> tuple[str, ...]:
    """Groups of the open training step."""
    return () if state.open_step is None else state.open_step.group_ids


def spare_prompts(state: RolloutState) -> tuple[str, ...]:
    """Prompts in the replacement reserve."""
    return tuple(prompt.prompt_id for prompt in state.runtime.replacement_reserve)


def _first_spares(state: RolloutState, count: int) -> tuple[str, ...]:
    reserve = state.runtime.replacement_reserve
    return tuple(prompt.prompt_id for prompt in islice(reserve, count))


def _entries(entries: HashTrieMap[str, V], keys: tuple[str, ...]) -> HashTrieMap[str, V]:
    return HashTrieMap({key: entries[key] for key in keys if key in entries})
