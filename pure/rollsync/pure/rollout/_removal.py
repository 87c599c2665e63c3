"""Transitions that take a group or rows away: drops with a reason, clears, and a resume's undoing.

Rule: a drop, its reason, its replacement (or the shortfall of its batch) and the garbage it leaves
are one event, so the trainer never waits for a group that nobody will deliver.
"""

from __future__ import annotations

from msgspec.structs import replace

from rollsync.pure.rollout._parts import (
    first_unclaimed_step,
    new_group,
    ready,
    staged_keys_of,
    unfinished,
    with_record,
    with_rows_to_clear,
    with_shortfall,
    without_record,
)
from rollsync.pure.rollout.errors import (
    NotCanonical,
    RowsNotClearable,
    ShortfallRefused,
    TransitionError,
    UnknownGroup,
    WrongStatus,
    WrongWeightVersion,
)
from rollsync.pure.rollout.events import (
    CanonicalDuplicateDiscarded,
    GroupDropped,
    ReadyGroupReopened,
    RowsCleared,
)
from rollsync.pure.rollout.state import (
    Dropped,
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    ReplayGroup,
    RolloutState,
)

_DROPPABLE = (PromptGroupStatus.GENERATING, PromptGroupStatus.READY_TO_FINALIZE)


def dropped(state: RolloutState, event: GroupDropped) -> RolloutState | TransitionError:
    """The group will not be trained. See `GroupDropped` for what takes its place."""
    group = _droppable(state, event.group_id)
    if not isinstance(group, PromptGroupRecoveryRecord | ReplayGroup):
        return group
    if not 0 <= event.start_weight_version <= state.progress.trainer_version:
        return WrongWeightVersion(
            what="start",
            weight_version=event.start_weight_version,
            at_least=0,
            at_most=state.progress.trainer_version,
        )
    outcome = Dropped(step=state.progress.train_steps + 1, reason=event.reason)
    removed = _without_group(state, group)
    removed = replace(removed, outcomes=removed.outcomes.insert(group.prompt.prompt_id, outcome))
    if not removed.runtime.replacement_reserve.is_empty():
        return _replaced(removed, group, event.start_weight_version)
    refused = _shortfall_refused(state, group, event)
    if refused is not None:
        return refused
    if event.shortfall_step is None:
        return removed
    return with_shortfall(removed, event.shortfall_step, 1)


def rows_cleared(state: RolloutState, event: RowsCleared) -> RolloutState | TransitionError:
    """The data plane has forgotten rows that nothing owns."""
    unknown = tuple(key for key in event.keys if key not in state.rows_to_clear)
    if unknown:
        return RowsNotClearable(keys=unknown)
    waiting = state.rows_to_clear
    for key in event.keys:
        waiting = waiting.discard(key)
    return replace(state, rows_to_clear=waiting)


def reopened(state: RolloutState, event: ReadyGroupReopened) -> RolloutState | TransitionError:
    """A ready group goes back into its batch and is generated again from the start."""
    group = ready(state, event.group_id)
    if not isinstance(group, ReplayGroup):
        return group
    record = new_group(
        group.prompt,
        granularity=group.granularity,
        expected_generations=len(group.sample_ids),
        admission_id=group.admission_id,
        target_step=group.target_step,
        start_weight_version=group.start_weight_version,
    )
    return with_record(_without_group(state, group), record)


def duplicate_discarded(
    state: RolloutState, event: CanonicalDuplicateDiscarded
) -> RolloutState | TransitionError:
    """The ledger forgets a group whose prompt has another place already."""
    record = unfinished(state, event.group_id)
    if isinstance(record, UnknownGroup):
        return record
    published = state.replay.get(event.group_id)
    if published is None and record.prompt.prompt_id not in state.outcomes:
        return NotCanonical(group_id=event.group_id)
    owned = set(() if published is None else published.sample_ids)
    freed = [key for key in staged_keys_of(record) if key not in owned]
    return with_rows_to_clear(without_record(state, event.group_id), freed)


def _droppable(
    state: RolloutState, group_id: str
) -> PromptGroupRecoveryRecord | ReplayGroup | TransitionError:
    record = state.ledger.groups.get(group_id)
    if record is None:
        group = ready(state, group_id)
        if isinstance(group, UnknownGroup):
            return UnknownGroup(group_id=group_id, needed="unfinished or ready")
        return group
    if record.status not in _DROPPABLE:
        return WrongStatus(group_id=group_id, status=record.status, needed=_DROPPABLE)
    return record


def _without_group(
    state: RolloutState, group: PromptGroupRecoveryRecord | ReplayGroup
) -> RolloutState:
    """The state without the group; its rows wait to be cleared."""
    if isinstance(group, PromptGroupRecoveryRecord):
        return with_rows_to_clear(without_record(state, group.group_id), staged_keys_of(group))
    runtime = state.runtime
    removed = replace(
        state,
        replay=state.replay.remove(group.group_id),
        runtime=replace(
            runtime,
            finalizer_metrics_by_group=runtime.finalizer_metrics_by_group.discard(group.group_id),
            finalizer_rewards_by_group=runtime.finalizer_rewards_by_group.discard(group.group_id),
        ),
    )
    return with_rows_to_clear(removed, group.sample_ids)


def _replaced(
    state: RolloutState,
    group: PromptGroupRecoveryRecord | ReplayGroup,
    start_weight_version: int,
) -> RolloutState:
    """The state in which the reserve's first prompt has the place of the removed `group`."""
    reserve = state.runtime.replacement_reserve
    admission_id = group.admission_id
    expected = (
        len(group.sample_ids) if isinstance(group, ReplayGroup) else group.expected_generations
    )
    record = new_group(
        reserve.peek(),
        granularity=group.granularity,
        expected_generations=expected,
        admission_id=admission_id,
        target_step=group.target_step,
        start_weight_version=None if admission_id is None else start_weight_version,
    )
    return with_record(
        replace(state, runtime=replace(state.runtime, replacement_reserve=reserve.dequeue())),
        record,
    )


def _shortfall_refused(
    state: RolloutState,
    group: PromptGroupRecoveryRecord | ReplayGroup,
    event: GroupDropped,
) -> ShortfallRefused | None:
    """The missing group must be counted where the trainer will miss it, and nowhere else."""
    step = event.shortfall_step
    if isinstance(group, PromptGroupRecoveryRecord) and group.phase is PromptGroupPhase.RESERVED:
        if step is None:
            return None
        return ShortfallRefused(group_id=group.group_id, shortfall_step=step, first=None, last=None)
    if state.runtime.sampler_stamps_target_steps:
        first, last = group.target_step, group.target_step
        legal = step is not None and step == first
    else:
        first, last = first_unclaimed_step(state), state.sampler_dispatch_index
        legal = step is None or first <= step <= last
    if legal:
        return None
    return ShortfallRefused(group_id=group.group_id, shortfall_step=step, first=first, last=last)
