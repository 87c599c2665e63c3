"""Which attempt of a sibling may be sent to an engine next."""

from __future__ import annotations

from rollsync.pure.rollout.events import AttemptDispatched
from rollsync.pure.rollout.state import PromptGroupRecoveryRecord, RolloutAttemptStatus


def next_dispatch(
    record: PromptGroupRecoveryRecord, sibling_index: int
) -> AttemptDispatched | None:
    """The dispatch of the sibling's next attempt; None if one is running or sealed already."""
    last = record.siblings[sibling_index].attempts[-1]
    if last.status in (RolloutAttemptStatus.DISPATCHED, RolloutAttemptStatus.SEALED):
        return None
    reserved = last.status is RolloutAttemptStatus.RESERVED
    index = last.index if reserved else last.index + 1
    return AttemptDispatched(
        group_id=record.group_id, sibling_index=sibling_index, attempt_index=index
    )
