"""Looking into and rebuilding parts of a `RolloutState`, for the transitions only."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace
from rpds import HashTrieMap

from rollsync.pure.rollout.errors import GroupClaimed, UnknownGroup
from rollsync.pure.rollout.state import (
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptReference,
    RecoveryGranularity,
    ReplayGroup,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutRecoveryLedger,
    RolloutSiblingRecord,
    RolloutState,
)


def unfinished(state: RolloutState, group_id: str) -> PromptGroupRecoveryRecord | UnknownGroup:
    """The ledger's record of the group."""
    record = state.ledger.groups.get(group_id)
    return UnknownGroup(group_id=group_id, needed="unfinished") if record is None else record


def ready(state: RolloutState, group_id: str) -> ReplayGroup | UnknownGroup | GroupClaimed:
    """The replay index's entry of the group, if no step claims it. O(claims)."""
    group = state.replay.get(group_id)
    if group is None:
        return UnknownGroup(group_id=group_id, needed="ready")
    if state.open_step is not None and group_id in state.open_step.group_ids:
        return GroupClaimed(group_id=group_id, step=state.open_step.step)
    return group


def with_groups(
    state: RolloutState, groups: HashTrieMap[str, PromptGroupRecoveryRecord]
) -> RolloutState:
    """The state with another set of unfinished groups."""
    return replace(state, ledger=RolloutRecoveryLedger(groups=groups))


def with_record(state: RolloutState, record: PromptGroupRecoveryRecord) -> RolloutState:
    """The state with one unfinished group added or replaced."""
    return with_groups(state, state.ledger.groups.insert(record.group_id, record))


def without_record(state: RolloutState, group_id: str) -> RolloutState:
    """The state with one unfinished group forgotten."""
    return with_groups(state, state.ledger.groups.discard(group_id))


def with_shortfall(state: RolloutState, target_step: int, count: int) -> RolloutState:
    """The state in which `target_step` lacks `count` groups more."""
    if count == 0:
        return state
    shortfall = state.runtime.batch_shortfall
    lacking = shortfall.get(target_step, 0) + count
    return replace(
        state,
        runtime=replace(state.runtime, batch_shortfall=shortfall.insert(target_step, lacking)),
    )


def with_rows_to_clear(state: RolloutState, keys: Iterable[str]) -> RolloutState:
    """The state in which nothing owns `keys` any more."""
    return replace(state, rows_to_clear=state.rows_to_clear.update(keys))


def first_unclaimed_step(state: RolloutState) -> int:
    """Target step of the first batch that no training step has taken."""
    return state.progress.trainer_version + (0 if state.open_step is None else 1)


def new_group(
    prompt: PromptReference,
    *,
    granularity: RecoveryGranularity,
    expected_generations: int,
    admission_id: str | None = None,
    target_step: int | None = None,
    start_weight_version: int | None = None,
) -> PromptGroupRecoveryRecord:
    """A group of which nothing is generated; admitted if it has an admission id."""
    first = RolloutAttemptRecord(index=0, status=RolloutAttemptStatus.RESERVED)
    return PromptGroupRecoveryRecord(
        group_id=prompt.prompt_id,
        admission_id=admission_id,
        prompt=prompt,
        granularity=granularity,
        expected_generations=expected_generations,
        target_step=target_step,
        start_weight_version=start_weight_version,
        phase=PromptGroupPhase.RESERVED if admission_id is None else PromptGroupPhase.ADMITTED,
        status=PromptGroupStatus.GENERATING,
        siblings=tuple(
            RolloutSiblingRecord(index=index, attempts=(first,))
            for index in range(expected_generations)
        ),
    )


def staged_keys_of(record: PromptGroupRecoveryRecord) -> tuple[str, ...]:
    """Rows that the group's sealed attempts own, sibling by sibling."""
    keys: list[str] = []
    for sibling in record.siblings:
        for attempt in sibling.attempts:
            keys.extend(attempt.staged_keys)
    return tuple(keys)


def refused_key_reason(state: RolloutState, group_id: str, keys: tuple[str, ...]) -> str | None:
    """Why the group may not come to own `keys`, or None. See `state.staged_key` for the rule."""
    prefix = f"{group_id}/"
    if not all(key.startswith(prefix) for key in keys):
        return f"a row key of this group starts with {prefix}"
    if len(set(keys)) != len(keys):
        return "a key is named twice"
    if any(key in state.rows_to_clear for key in keys):
        return "a row of that key is waiting to be cleared"
    return None
