"""The rules that every reachable `RolloutState` keeps, as one checkable list.

`apply` keeps them by construction; tests check that it does, and a restored state (which came from
a file) is checked before anything is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from itertools import chain

from msgspec import Struct

from rollsync.pure.rollout._parts import first_unclaimed_step, staged_keys_of
from rollsync.pure.rollout.persistent import items_of
from rollsync.pure.rollout.state import (
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    ReplayGroup,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutSiblingRecord,
    RolloutState,
    Trained,
)


class Rule(StrEnum):
    """A rule's name, as `docs/resume-correctness.md` uses it."""

    ONE_PLACE = "one_place"
    """Every handed-out prompt has exactly one place."""
    KEYS_AGREE = "keys_agree"
    """A map's key is the id inside its value; a group's id is its prompt's."""
    CONTIGUOUS = "contiguous"
    """Siblings and attempts are numbered 0, 1, 2 and so on; a sibling has an attempt."""
    LAST_ATTEMPT = "last_attempt"
    """Only the last attempt of a sibling is reserved, dispatched or sealed."""
    SEALED_FIELDS = "sealed_fields"
    """An attempt has a receipt, reward, mask and staged keys exactly if it is sealed."""
    STATUS = "status"
    """A generating group has an unsealed sibling; at any other status it has none."""
    PHASE = "phase"
    """A reserved group has no admission, stamp, version or running attempt; an admitted one has."""
    ADMISSION = "admission"
    """Groups of one admission agree on phase and target step."""
    STAMPS = "stamps"
    """Target steps exist exactly if the policy stamps; none is beyond the cursor or passed."""
    ROWS = "rows"
    """A row has one owner, named by its key's prefix, or waits to be cleared."""
    ROW_COUNTS = "row_counts"
    """A ready group has a row, length, reward and mask per sibling."""
    OPEN_STEP = "open_step"
    """The open step is the next one, and its claims are in the replay index, each once."""
    COUNTERS = "counters"
    """No counter is negative, no weight version from the future, commit indices are distinct."""
    SHORTFALL = "shortfall"
    """A shortfall is positive, and of a batch that is admitted and not trained."""
    FINALIZER_VALUES = "finalizer_values"
    """Finalizer metrics and rewards belong to ready groups."""


class Violation(Struct, frozen=True, kw_only=True):
    """A broken rule: what it is about, and what is wrong."""

    rule: Rule
    subject: str
    detail: str


def check_invariants(state: RolloutState) -> tuple[Violation, ...]:
    """Every violation in `state`; empty for every state that `apply` can reach. O(n)."""
    return tuple(_violations(state))


def _violations(state: RolloutState) -> Iterator[Violation]:
    # Walking a persistent map costs as much as looking at what it holds: each is walked once.
    unfinished = items_of(state.ledger.groups)
    ready = items_of(state.replay)
    records = [record for _, record in unfinished]
    groups = [group for _, group in ready]
    yield from _one_place(state, records, groups)
    for group_id, record in unfinished:
        # Nearly every record is sound, and a state may have 100,000: only a suspect is looked
        # into with words for what is wrong.
        if not _is_plainly_sound(group_id, record):
            yield from _identity(group_id, record)
            yield from _record(record)
        if record.start_weight_version is not None or record.target_step is not None:
            yield from _versions(state, group_id, record.start_weight_version, record.target_step)
    for group_id, group in ready:
        yield from _identity(group_id, group)
        yield from _ready(group)
        yield from _versions(state, group_id, group.start_weight_version, group.target_step)
    yield from _admissions(records, groups)
    yield from _rows(state, records, groups)
    yield from _open_step(state)
    yield from _counters(state, groups)
    yield from _runtime(state)


def _one_place(
    state: RolloutState, records: list[PromptGroupRecoveryRecord], groups: list[ReplayGroup]
) -> Iterator[Violation]:
    prompt_ids = [record.prompt.prompt_id for record in records]
    prompt_ids += [group.prompt.prompt_id for group in groups]
    prompt_ids += [prompt.prompt_id for prompt in state.runtime.replacement_reserve]
    prompt_ids += [prompt_id for prompt_id, _ in items_of(state.outcomes)]
    if len(set(prompt_ids)) < len(prompt_ids):
        for prompt_id, count in sorted(Counter(prompt_ids).items()):
            if count > 1:
                detail = f"has {count} places"
                yield Violation(rule=Rule.ONE_PLACE, subject=prompt_id, detail=detail)


def _is_plainly_sound(group_id: str, record: PromptGroupRecoveryRecord) -> bool:
    """Whether `_identity` and `_record` have nothing to say, in as few steps as possible."""
    if not group_id == record.group_id == record.prompt.prompt_id:
        return False
    unsealed = ran = False
    for expected, sibling in enumerate(record.siblings):
        attempts = sibling.attempts
        if sibling.index != expected or not attempts:
            return False
        last = len(attempts) - 1
        for index, attempt in enumerate(attempts):
            status = attempt.status
            if attempt.index != index or (index != last and status not in _ENDED):
                return False
            if not _seal_is_whole(attempt):
                return False
        status = attempts[-1].status
        if status is not _SEALED:
            unsealed = True
        if last or status is not RolloutAttemptStatus.RESERVED:
            ran = True
    admitted = record.phase is PromptGroupPhase.ADMITTED
    return (
        len(record.siblings) == record.expected_generations > 0
        and unsealed is (record.status is PromptGroupStatus.GENERATING)
        and (record.admission_id is not None) is admitted
        and (record.start_weight_version is not None) is admitted
        and (admitted or not ran)
    )


def _identity(group_id: str, group: PromptGroupRecoveryRecord | ReplayGroup) -> Iterator[Violation]:
    if not group_id == group.group_id == group.prompt.prompt_id:
        names = f"key {group_id}, group {group.group_id}, prompt {group.prompt.prompt_id}"
        yield Violation(rule=Rule.KEYS_AGREE, subject=group_id, detail=names)


def _record(record: PromptGroupRecoveryRecord) -> Iterator[Violation]:
    name = record.group_id
    expected, unsealed, ran = 0, False, False
    for sibling in record.siblings:
        if sibling.index != expected:
            detail = f"has sibling {sibling.index} in place {expected}"
            yield Violation(rule=Rule.CONTIGUOUS, subject=name, detail=detail)
        expected += 1
        attempts = sibling.attempts
        if not attempts or attempts[-1].status is not _SEALED:
            unsealed = True
        if len(attempts) != 1 or attempts[0].status is not RolloutAttemptStatus.RESERVED:
            ran = True
        yield from _attempts(name, sibling)
    if expected != record.expected_generations or expected == 0:
        detail = f"has {expected} siblings, expected {record.expected_generations}"
        yield Violation(rule=Rule.CONTIGUOUS, subject=name, detail=detail)
    if unsealed is not (record.status is PromptGroupStatus.GENERATING):
        detail = f"{record.status} with {'an' if unsealed else 'no'} unsealed sibling"
        yield Violation(rule=Rule.STATUS, subject=name, detail=detail)
    admitted = record.phase is PromptGroupPhase.ADMITTED
    if (record.admission_id is not None) is not admitted:
        detail = f"{record.phase} with admission id {record.admission_id}"
        yield Violation(rule=Rule.PHASE, subject=name, detail=detail)
    if (record.start_weight_version is not None) is not admitted:
        detail = f"{record.phase} with start weight version {record.start_weight_version}"
        yield Violation(rule=Rule.PHASE, subject=name, detail=detail)
    if ran and not admitted:
        yield Violation(rule=Rule.PHASE, subject=name, detail="reserved, but an attempt has run")


def _attempts(group_id: str, sibling: RolloutSiblingRecord) -> Iterator[Violation]:
    last = len(sibling.attempts) - 1
    if last < 0:
        name = f"{group_id}, sibling {sibling.index}"
        yield Violation(rule=Rule.CONTIGUOUS, subject=name, detail="has no attempt")
    for expected, attempt in enumerate(sibling.attempts):
        if attempt.index != expected:
            name = f"{group_id}, sibling {sibling.index}"
            detail = f"has attempt {attempt.index} in place {expected}"
            yield Violation(rule=Rule.CONTIGUOUS, subject=name, detail=detail)
        if expected != last and attempt.status not in _ENDED:
            name = f"{group_id}, sibling {sibling.index}"
            detail = f"attempt {attempt.index} is {attempt.status}, and not the last"
            yield Violation(rule=Rule.LAST_ATTEMPT, subject=name, detail=detail)
        if not _seal_is_whole(attempt):
            name = f"{group_id}, sibling {sibling.index}"
            detail = f"attempt {attempt.index} is {attempt.status}, seal: {_seal_of(attempt)}"
            yield Violation(rule=Rule.SEALED_FIELDS, subject=name, detail=detail)


_SEALED = RolloutAttemptStatus.SEALED
_ENDED = (RolloutAttemptStatus.FAILED, RolloutAttemptStatus.ABANDONED)


def _seal_is_whole(attempt: RolloutAttemptRecord) -> bool:
    """Whether the attempt has all fields of a seal, or none, as its status wants."""
    sealed = attempt.status is _SEALED
    return (
        (attempt.receipt is not None) is sealed
        and (attempt.reward is not None) is sealed
        and (attempt.masked is not None) is sealed
        and bool(attempt.staged_keys) is sealed
    )


def _seal_of(attempt: RolloutAttemptRecord) -> str:
    return (
        f"receipt {attempt.receipt}, reward {attempt.reward}, mask {attempt.masked}, "
        f"{len(attempt.staged_keys)} staged keys"
    )


def _ready(group: ReplayGroup) -> Iterator[Violation]:
    counts = {
        len(group.sample_ids),
        len(group.lengths),
        len(group.rewards),
        len(group.masked),
    }
    if len(counts) != 1 or 0 in counts:
        yield Violation(
            rule=Rule.ROW_COUNTS,
            subject=group.group_id,
            detail=f"{len(group.sample_ids)} rows, {len(group.lengths)} lengths, "
            f"{len(group.rewards)} rewards, {len(group.masked)} masks",
        )
    if group.end_weight_version < group.start_weight_version:
        yield Violation(
            rule=Rule.COUNTERS,
            subject=group.group_id,
            detail=f"ended at weight version {group.end_weight_version}, "
            f"before it started at {group.start_weight_version}",
        )


def _versions(
    state: RolloutState, group_id: str, version: int | None, target_step: int | None
) -> Iterator[Violation]:
    if version is None:
        if target_step is not None:
            detail = f"reserved, but stamped with target step {target_step}"
            yield Violation(rule=Rule.STAMPS, subject=group_id, detail=detail)
        return
    if not 0 <= version <= state.progress.trainer_version:
        detail = f"weight version {version}, the trainer has {state.progress.trainer_version}"
        yield Violation(rule=Rule.COUNTERS, subject=group_id, detail=detail)
    if (target_step is not None) is not state.runtime.sampler_stamps_target_steps:
        detail = f"target step {target_step}, against the policy's stamping"
        yield Violation(rule=Rule.STAMPS, subject=group_id, detail=detail)
    elif target_step is not None and not (
        state.progress.trainer_version <= target_step <= state.sampler_dispatch_index
    ):
        detail = (
            f"target step {target_step}, outside {state.progress.trainer_version} to "
            f"{state.sampler_dispatch_index}"
        )
        yield Violation(rule=Rule.STAMPS, subject=group_id, detail=detail)


def _admissions(
    records: list[PromptGroupRecoveryRecord], groups: list[ReplayGroup]
) -> Iterator[Violation]:
    """Groups of one admission that disagree on their target step (their phase is `Rule.PHASE`)."""
    target_of: dict[str, int | None] = {}
    unfinished = ((record.admission_id, record.target_step) for record in records)
    ready = ((group.admission_id, group.target_step) for group in groups)
    for admission_id, target_step in chain(unfinished, ready):
        if admission_id is None:
            continue
        first = target_of.setdefault(admission_id, target_step)
        if first != target_step:
            detail = f"target steps {first} and {target_step}"
            yield Violation(rule=Rule.ADMISSION, subject=admission_id, detail=detail)


def _rows(
    state: RolloutState, records: list[PromptGroupRecoveryRecord], groups: list[ReplayGroup]
) -> Iterator[Violation]:
    """Rows with a wrong prefix, owned twice, or owned and garbage. As ids have no slash, a row
    whose key has its owner's prefix can have no other owner."""
    staged = ((record.group_id, staged_keys_of(record)) for record in records)
    published = ((group.group_id, group.sample_ids) for group in groups)
    garbage = state.rows_to_clear
    for group_id, keys in chain(staged, published):
        if not keys:
            continue
        prefix = f"{group_id}/"
        for key in keys:
            if not key.startswith(prefix):
                yield Violation(rule=Rule.ROWS, subject=key, detail=f"owned by {group_id}")
            if key in garbage:
                detail = f"waits to be cleared, and {group_id} owns it"
                yield Violation(rule=Rule.ROWS, subject=key, detail=detail)
        if len(set(keys)) != len(keys):
            yield Violation(rule=Rule.ROWS, subject=group_id, detail="owns a row twice")


def _open_step(state: RolloutState) -> Iterator[Violation]:
    step = state.open_step
    if step is None:
        return
    name = f"training step {step.step}"
    if step.step != state.progress.train_steps + 1:
        detail = f"after {state.progress.train_steps} steps"
        yield Violation(rule=Rule.OPEN_STEP, subject=name, detail=detail)
    if len(set(step.group_ids)) != len(step.group_ids):
        yield Violation(rule=Rule.OPEN_STEP, subject=name, detail="claims a group twice")
    for group_id in step.group_ids:
        if group_id not in state.replay:
            detail = f"claims {group_id}, which is not ready"
            yield Violation(rule=Rule.OPEN_STEP, subject=name, detail=detail)


def _counters(state: RolloutState, groups: list[ReplayGroup]) -> Iterator[Violation]:
    progress, dataloader = state.progress, state.dataloader_state
    for name, value, least in (
        ("train steps", progress.train_steps, 0),
        ("trainer version", progress.trainer_version, 0),
        ("dataloader position", dataloader.position, 0),
        ("dispatch index", state.sampler_dispatch_index, -1),
        ("task index", state.next_nemo_gym_task_index, 0),
    ):
        if value < least:
            yield Violation(rule=Rule.COUNTERS, subject=name, detail=f"{value} is below {least}")
    if progress.current_epoch != dataloader.epoch:
        detail = f"{progress.current_epoch}, the dataloader is in epoch {dataloader.epoch}"
        yield Violation(rule=Rule.COUNTERS, subject="current epoch", detail=detail)
    indices = [group.commit_index for group in groups]
    if len(set(indices)) != len(indices) or any(
        not 0 <= index < state.next_commit_index for index in indices
    ):
        detail = f"not distinct, or not below {state.next_commit_index}"
        yield Violation(rule=Rule.COUNTERS, subject="commit indices", detail=detail)
    for prompt_id, outcome in items_of(state.outcomes):
        last = progress.train_steps + (0 if isinstance(outcome, Trained) else 1)
        if not 1 <= outcome.step <= last:
            detail = f"has an outcome of step {outcome.step}, after {progress.train_steps} steps"
            yield Violation(rule=Rule.COUNTERS, subject=prompt_id, detail=detail)


def _runtime(state: RolloutState) -> Iterator[Violation]:
    runtime = state.runtime
    first = first_unclaimed_step(state) - (0 if state.open_step is None else 1)
    for target_step, count in runtime.batch_shortfall.items():
        if count < 1 or not first <= target_step <= state.sampler_dispatch_index:
            detail = f"lacks {count}, batches {first} to {state.sampler_dispatch_index} are live"
            yield Violation(
                rule=Rule.SHORTFALL, subject=f"target step {target_step}", detail=detail
            )
    for group_id in (*runtime.finalizer_metrics_by_group, *runtime.finalizer_rewards_by_group):
        if group_id not in state.replay:
            yield Violation(rule=Rule.FINALIZER_VALUES, subject=group_id, detail="is not ready")
