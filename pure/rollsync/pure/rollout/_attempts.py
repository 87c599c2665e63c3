"""Transitions of attempts: one physical generation of one sibling at a time.

Rule: attempts are contiguous from 0, only the last one can be alive, and a sealed one ends its
sibling. A result of an attempt that is not dispatched any more is refused, so that a late answer
after an abort or a resume can never be counted.
"""

from __future__ import annotations

from math import isfinite

from msgspec.structs import replace

from rollsync.pure.rollout._parts import (
    refused_key_reason,
    unfinished,
    with_record,
    with_rows_to_clear,
)
from rollsync.pure.rollout.errors import (
    NotFinite,
    RowKeysRefused,
    SealedDifferently,
    TransitionError,
    UnknownAttempt,
    UnknownGroup,
    UnknownSibling,
    WrongAttemptStatus,
    WrongCount,
    WrongPhase,
    WrongStatus,
)
from rollsync.pure.rollout.events import (
    AttemptAbandoned,
    AttemptDispatched,
    AttemptFailed,
    RecoveryRedispatched,
    SiblingSealed,
)
from rollsync.pure.rollout.state import (
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutSiblingRecord,
    RolloutState,
)

_ENDED = (RolloutAttemptStatus.FAILED, RolloutAttemptStatus.ABANDONED)


def dispatched(state: RolloutState, event: AttemptDispatched) -> RolloutState | TransitionError:
    """A reserved attempt, or a new one after a failed or abandoned one, is sent to an engine."""
    record = unfinished(state, event.group_id)
    if isinstance(record, UnknownGroup):
        return record
    if record.phase is not PromptGroupPhase.ADMITTED:
        return WrongPhase(
            group_id=record.group_id, phase=record.phase, needed=PromptGroupPhase.ADMITTED
        )
    if record.status is not PromptGroupStatus.GENERATING:
        return WrongStatus(
            group_id=record.group_id, status=record.status, needed=(PromptGroupStatus.GENERATING,)
        )
    sibling = _sibling(record, event.sibling_index)
    if isinstance(sibling, UnknownSibling):
        return sibling
    last = sibling.attempts[-1]
    again = last.status in _ENDED
    needed = last.index + 1 if again else last.index
    if event.attempt_index != needed:
        return UnknownAttempt(
            group_id=record.group_id,
            sibling_index=sibling.index,
            attempt_index=event.attempt_index,
            needed=needed,
        )
    if not again and last.status is not RolloutAttemptStatus.RESERVED:
        return _wrong_status(event, last.status, (RolloutAttemptStatus.RESERVED, *_ENDED))
    attempt = RolloutAttemptRecord(index=needed, status=RolloutAttemptStatus.DISPATCHED)
    kept = sibling.attempts if again else sibling.attempts[:-1]
    return with_record(state, _with_sibling(record, replace(sibling, attempts=(*kept, attempt))))


def sealed(state: RolloutState, event: SiblingSealed) -> RolloutState | TransitionError:
    """An attempt's rows are staged. The group's last sibling makes the group ready to finalize."""
    found = _named_attempt(state, event)
    if not isinstance(found, tuple):
        return found
    record, sibling, attempt = found
    if attempt.status is RolloutAttemptStatus.SEALED:
        differing = _differing_fields(attempt, event)
        if not differing:
            return state
        return SealedDifferently(
            group_id=record.group_id,
            sibling_index=sibling.index,
            attempt_index=attempt.index,
            fields=differing,
        )
    if attempt.status is not RolloutAttemptStatus.DISPATCHED:
        return _wrong_status(event, attempt.status, (RolloutAttemptStatus.DISPATCHED,))
    if not isfinite(event.reward):
        return NotFinite(group_id=record.group_id, what=f"the reward of sibling {sibling.index}")
    refused = _staged_keys_refused(state, record, event)
    if refused is not None:
        return refused
    seal = RolloutAttemptRecord(
        index=attempt.index,
        status=RolloutAttemptStatus.SEALED,
        receipt=event.receipt,
        reward=event.reward,
        masked=event.masked,
        staged_keys=event.staged_keys,
    )
    progressed = replace(_with_last_attempt(record, sibling, seal), recovery_count=0)
    if all(_is_sealed(each) for each in progressed.siblings):
        progressed = replace(progressed, status=PromptGroupStatus.READY_TO_FINALIZE)
    return with_record(state, progressed)


def ended(
    state: RolloutState, event: AttemptFailed | AttemptAbandoned
) -> RolloutState | TransitionError:
    """A running attempt ended without a result."""
    found = _named_attempt(state, event)
    if not isinstance(found, tuple):
        return found
    record, sibling, attempt = found
    if attempt.status is not RolloutAttemptStatus.DISPATCHED:
        return _wrong_status(event, attempt.status, (RolloutAttemptStatus.DISPATCHED,))
    status = (
        RolloutAttemptStatus.FAILED
        if isinstance(event, AttemptFailed)
        else RolloutAttemptStatus.ABANDONED
    )
    return with_record(state, _with_last_attempt(record, sibling, replace(attempt, status=status)))


def redispatched(
    state: RolloutState, event: RecoveryRedispatched
) -> RolloutState | TransitionError:
    """A resume takes the group up: nobody answers for its running attempts any more."""
    record = unfinished(state, event.group_id)
    if isinstance(record, UnknownGroup):
        return record
    takes = (PromptGroupStatus.GENERATING, PromptGroupStatus.READY_TO_FINALIZE)
    if record.status not in takes:
        return WrongStatus(group_id=record.group_id, status=record.status, needed=takes)
    freed: list[str] = []
    siblings: list[RolloutSiblingRecord] = []
    complete, was_running = True, False
    for sibling in record.siblings:
        last = sibling.attempts[-1]
        was_running = was_running or last.status is RolloutAttemptStatus.DISPATCHED
        if event.restart_whole:
            freed.extend(last.staged_keys)
        taken = _taken_up(sibling, restart=event.restart_whole)
        complete = complete and _is_sealed(taken)
        siblings.append(taken)
    taken_up = replace(
        record,
        siblings=tuple(siblings),
        status=(PromptGroupStatus.READY_TO_FINALIZE if complete else PromptGroupStatus.GENERATING),
        recovery_count=record.recovery_count + (1 if was_running else 0),
    )
    return with_rows_to_clear(with_record(state, taken_up), freed)


def failed_attempts(sibling: RolloutSiblingRecord) -> int:
    """How many of the sibling's attempts failed; abandoned ones are nobody's fault."""
    failed = 0
    for attempt in sibling.attempts:
        if attempt.status is RolloutAttemptStatus.FAILED:
            failed += 1
    return failed


def is_exhausted(record: PromptGroupRecoveryRecord, *, max_failed_attempts: int) -> bool:
    """Whether a sibling has used up its attempts: the group is to be dropped as unrecoverable.

    Attempts are part of the ledger, so the bound holds across resumes.
    """
    return any(failed_attempts(sibling) >= max_failed_attempts for sibling in record.siblings)


def _taken_up(sibling: RolloutSiblingRecord, *, restart: bool) -> RolloutSiblingRecord:
    last = sibling.attempts[-1]
    if last.status is RolloutAttemptStatus.RESERVED:
        return sibling
    if last.status is RolloutAttemptStatus.SEALED and not restart:
        return sibling
    ended = RolloutAttemptRecord(
        index=last.index,
        status=(
            RolloutAttemptStatus.FAILED
            if last.status is RolloutAttemptStatus.FAILED
            else RolloutAttemptStatus.ABANDONED
        ),
    )
    anew = RolloutAttemptRecord(index=last.index + 1, status=RolloutAttemptStatus.RESERVED)
    return replace(sibling, attempts=(*sibling.attempts[:-1], ended, anew))


def _is_sealed(sibling: RolloutSiblingRecord) -> bool:
    return sibling.attempts[-1].status is RolloutAttemptStatus.SEALED


def _sibling(
    record: PromptGroupRecoveryRecord, sibling_index: int
) -> RolloutSiblingRecord | UnknownSibling:
    if 0 <= sibling_index < len(record.siblings):
        return record.siblings[sibling_index]
    return UnknownSibling(
        group_id=record.group_id,
        sibling_index=sibling_index,
        sibling_count=len(record.siblings),
    )


def _named_attempt(
    state: RolloutState, event: SiblingSealed | AttemptFailed | AttemptAbandoned
) -> (
    tuple[PromptGroupRecoveryRecord, RolloutSiblingRecord, RolloutAttemptRecord]
    | UnknownGroup
    | UnknownSibling
    | UnknownAttempt
    | WrongAttemptStatus
):
    """The attempt that the event names, which must be its sibling's last one."""
    record = unfinished(state, event.group_id)
    if isinstance(record, UnknownGroup):
        return record
    sibling = _sibling(record, event.sibling_index)
    if isinstance(sibling, UnknownSibling):
        return sibling
    last = sibling.attempts[-1]
    if event.attempt_index == last.index:
        return record, sibling, last
    if 0 <= event.attempt_index < last.index:
        earlier = sibling.attempts[event.attempt_index]
        return _wrong_status(event, earlier.status, (RolloutAttemptStatus.DISPATCHED,))
    return UnknownAttempt(
        group_id=record.group_id,
        sibling_index=sibling.index,
        attempt_index=event.attempt_index,
        needed=last.index,
    )


def _with_sibling(
    record: PromptGroupRecoveryRecord, sibling: RolloutSiblingRecord
) -> PromptGroupRecoveryRecord:
    at = sibling.index
    siblings = (*record.siblings[:at], sibling, *record.siblings[at + 1 :])
    return replace(record, siblings=siblings)


def _with_last_attempt(
    record: PromptGroupRecoveryRecord,
    sibling: RolloutSiblingRecord,
    attempt: RolloutAttemptRecord,
) -> PromptGroupRecoveryRecord:
    return _with_sibling(record, replace(sibling, attempts=(*sibling.attempts[:-1], attempt)))


def _differing_fields(attempt: RolloutAttemptRecord, event: SiblingSealed) -> tuple[str, ...]:
    pairs = (
        ("receipt", attempt.receipt == event.receipt),
        ("reward", attempt.reward == event.reward),
        ("masked", attempt.masked == event.masked),
        ("staged_keys", attempt.staged_keys == event.staged_keys),
    )
    return tuple(name for name, same in pairs if not same)


def _staged_keys_refused(
    state: RolloutState, record: PromptGroupRecoveryRecord, event: SiblingSealed
) -> RowKeysRefused | WrongCount | None:
    if not event.staged_keys:
        return WrongCount(what="staged keys", count=0, needed=1)
    reason = refused_key_reason(state, record.group_id, event.staged_keys)
    if reason is None:
        owned = {key for each in record.siblings for key in each.attempts[-1].staged_keys}
        if not owned.isdisjoint(event.staged_keys):
            reason = "another sibling owns a row of that key"
    if reason is None:
        return None
    return RowKeysRefused(group_id=record.group_id, keys=event.staged_keys, reason=reason)


def _wrong_status(
    event: AttemptDispatched | SiblingSealed | AttemptFailed | AttemptAbandoned,
    status: RolloutAttemptStatus,
    needed: tuple[RolloutAttemptStatus, ...],
) -> WrongAttemptStatus:
    return WrongAttemptStatus(
        group_id=event.group_id,
        sibling_index=event.sibling_index,
        attempt_index=event.attempt_index,
        status=status,
        needed=needed,
    )
