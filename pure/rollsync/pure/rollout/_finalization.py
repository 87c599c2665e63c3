"""Transitions from a fully sealed group to the replay index.

Rule: publishing, indexing and forgetting in the ledger are one event, so no group is both
unfinished and ready. A finalization whose outcome is unknown stays unknown until somebody has
looked, and nothing is saved meanwhile.
"""

from __future__ import annotations

from math import isfinite

from msgspec.structs import replace
from rpds import HashTrieMap

from rollsync.pure.rollout._parts import (
    refused_key_reason,
    staged_keys_of,
    unfinished,
    with_record,
    with_rows_to_clear,
    without_record,
)
from rollsync.pure.rollout.errors import (
    NotFinite,
    RowKeysRefused,
    TransitionError,
    UnknownGroup,
    UnknownSibling,
    WrongCount,
    WrongPhase,
    WrongStatus,
    WrongWeightVersion,
)
from rollsync.pure.rollout.events import FinalizationFailed, FinalizationStarted, GroupCommitted
from rollsync.pure.rollout.state import (
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    ReplayGroup,
    RolloutState,
)

_RUNNING = (PromptGroupStatus.FINALIZING, PromptGroupStatus.FINALIZATION_UNKNOWN)


def started(state: RolloutState, event: FinalizationStarted) -> RolloutState | TransitionError:
    """Somebody turns the group's staged rows into replay rows."""
    record = _in_status(state, event.group_id, (PromptGroupStatus.READY_TO_FINALIZE,))
    if not isinstance(record, PromptGroupRecoveryRecord):
        return record
    return with_record(state, replace(record, status=PromptGroupStatus.FINALIZING))


def failed(state: RolloutState, event: FinalizationFailed) -> RolloutState | TransitionError:
    """It did not publish (ready to finalize again), or nobody knows whether it did."""
    record = _in_status(state, event.group_id, _RUNNING)
    if not isinstance(record, PromptGroupRecoveryRecord):
        return record
    status = (
        PromptGroupStatus.READY_TO_FINALIZE
        if event.outcome_known
        else PromptGroupStatus.FINALIZATION_UNKNOWN
    )
    return with_record(state, replace(record, status=status))


def committed(state: RolloutState, event: GroupCommitted) -> RolloutState | TransitionError:
    """The rows are published: the group moves from the ledger to the replay index."""
    record = _in_status(state, event.group_id, _RUNNING)
    if not isinstance(record, PromptGroupRecoveryRecord):
        return record
    # An admitted group has both (invariants.py); the check also tells mypy so.
    if record.admission_id is None or record.start_weight_version is None:
        return WrongPhase(
            group_id=record.group_id, phase=record.phase, needed=PromptGroupPhase.ADMITTED
        )
    refused = _commit_refused(state, record, record.start_weight_version, event)
    if refused is not None:
        return refused
    sealed = [sibling.attempts[-1] for sibling in record.siblings]
    final = {each.sibling_index: each.reward for each in event.rewards}
    group = ReplayGroup(
        group_id=record.group_id,
        admission_id=record.admission_id,
        granularity=record.granularity,
        prompt=record.prompt,
        sample_ids=event.sample_ids,
        start_weight_version=record.start_weight_version,
        end_weight_version=event.end_weight_version,
        target_step=record.target_step,
        lengths=event.lengths,
        rewards=tuple(
            final.get(index, attempt.reward or 0.0) for index, attempt in enumerate(sealed)
        ),
        masked=tuple(attempt.masked is True for attempt in sealed),
        commit_index=state.next_commit_index,
    )
    published = set(event.sample_ids)
    unused = [key for key in staged_keys_of(record) if key not in published]
    moved = replace(
        without_record(state, record.group_id),
        replay=state.replay.insert(record.group_id, group),
        next_commit_index=state.next_commit_index + 1,
    )
    return with_rows_to_clear(_with_finalizer_values(moved, event), unused)


def _in_status(
    state: RolloutState, group_id: str, needed: tuple[PromptGroupStatus, ...]
) -> PromptGroupRecoveryRecord | UnknownGroup | WrongStatus:
    record = unfinished(state, group_id)
    if isinstance(record, UnknownGroup) or record.status in needed:
        return record
    return WrongStatus(group_id=group_id, status=record.status, needed=needed)


def _commit_refused(
    state: RolloutState,
    record: PromptGroupRecoveryRecord,
    start_weight_version: int,
    event: GroupCommitted,
) -> TransitionError | None:
    for what, count in (("sample ids", len(event.sample_ids)), ("lengths", len(event.lengths))):
        if count != record.expected_generations:
            return WrongCount(what=what, count=count, needed=record.expected_generations)
    for reward in event.rewards:
        if not 0 <= reward.sibling_index < len(record.siblings):
            return UnknownSibling(
                group_id=record.group_id,
                sibling_index=reward.sibling_index,
                sibling_count=len(record.siblings),
            )
        if not isfinite(reward.reward):
            return NotFinite(
                group_id=record.group_id, what=f"the reward of sibling {reward.sibling_index}"
            )
    for name, value in event.metrics:
        if not isfinite(value):
            return NotFinite(group_id=record.group_id, what=f"the metric {name!r}")
    if not start_weight_version <= event.end_weight_version <= state.progress.trainer_version:
        return WrongWeightVersion(
            what="end",
            weight_version=event.end_weight_version,
            at_least=start_weight_version,
            at_most=state.progress.trainer_version,
        )
    reason = refused_key_reason(state, record.group_id, event.sample_ids)
    if reason is not None:
        return RowKeysRefused(group_id=record.group_id, keys=event.sample_ids, reason=reason)
    return None


def _with_finalizer_values(state: RolloutState, event: GroupCommitted) -> RolloutState:
    runtime = state.runtime
    if event.metrics:
        metrics = runtime.finalizer_metrics_by_group.insert(
            event.group_id, HashTrieMap(event.metrics)
        )
        runtime = replace(runtime, finalizer_metrics_by_group=metrics)
    if event.rewards:
        rewards = runtime.finalizer_rewards_by_group.insert(event.group_id, event.rewards)
        runtime = replace(runtime, finalizer_rewards_by_group=rewards)
    return replace(state, runtime=runtime)
