"""Each rule of `check_invariants` notices a state that breaks it and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from msgspec import convert
from msgspec.structs import asdict, replace
from rpds import HashTrieMap, HashTrieSet

from rollsync.pure.rollout.events import GroupsClaimed
from rollsync.pure.rollout.invariants import (
    Rule,
    _identity,
    _is_plainly_sound,
    _record,
    check_invariants,
)
from rollsync.pure.rollout.state import (
    Dropped,
    DropReason,
    FinalizedReward,
    OpenTrainingStep,
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptOutcome,
    RecoveryGranularity,
    ReplayGroup,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutRecoveryLedger,
    RolloutSiblingRecord,
    RolloutState,
    Trained,
    sample_id_of,
    staged_key,
)
from tests.pure.rollout.events_kit import (
    admit,
    admitted,
    after,
    at,
    dispatch,
    fresh,
    made_ready,
    prompt,
    reserve,
    seal,
    train,
)


def base() -> RolloutState:
    """0 ready and claimed, 1 half sealed, 2 and 3 admitted in the second batch, 4 reserved."""
    state = after(fresh(stamped=True), reserve(0, 1, 2, 3, 4))
    state = after(state, admit(state, 0, 1))
    state = made_ready(after(state, admit(state, 2, 3)), "e0p0")
    state = after(state, dispatch("e0p1", 0), seal("e0p1", 0))
    return after(state, GroupsClaimed(step=1, group_ids=("e0p0",)))


def with_record(
    state: RolloutState, group_id: str, change: Callable[[PromptGroupRecoveryRecord], object]
) -> RolloutState:
    record = change(state.ledger.groups[group_id])
    assert isinstance(record, PromptGroupRecoveryRecord)
    groups = state.ledger.groups.insert(group_id, record)
    return replace(state, ledger=RolloutRecoveryLedger(groups=groups))


def with_first_attempts(
    record: PromptGroupRecoveryRecord, *attempts: RolloutAttemptRecord
) -> PromptGroupRecoveryRecord:
    first = replace(record.siblings[0], attempts=attempts)
    return replace(record, siblings=(first, *record.siblings[1:]))


def with_rows(state: RolloutState, *sample_ids: str) -> RolloutState:
    ready = replace(state.replay["e0p0"], sample_ids=sample_ids)
    return replace(state, replay=state.replay.insert("e0p0", ready))


RESERVED = RolloutAttemptRecord(index=0, status=RolloutAttemptStatus.RESERVED)

BREAKS: dict[Rule, list[Callable[[RolloutState], RolloutState]]] = {
    Rule.ONE_PLACE: [
        lambda s: replace(
            s, outcomes=s.outcomes.insert("e0p1", Dropped(step=1, reason=DropReason.STALE))
        ),
    ],
    Rule.KEYS_AGREE: [
        lambda s: with_record(s, "e0p2", lambda r: replace(r, group_id="other")),
    ],
    Rule.CONTIGUOUS: [
        lambda s: with_record(s, "e0p2", lambda r: replace(r, siblings=r.siblings[:1])),
        lambda s: with_record(
            s, "e0p2", lambda r: with_first_attempts(r, replace(RESERVED, index=1))
        ),
        lambda s: with_record(s, "e0p2", lambda r: replace(r, siblings=r.siblings[::-1])),
        lambda s: with_record(s, "e0p2", lambda r: with_first_attempts(r)),
        lambda s: with_record(s, "e0p2", lambda r: replace(r, expected_generations=3)),
    ],
    Rule.LAST_ATTEMPT: [
        lambda s: with_record(
            s, "e0p2", lambda r: with_first_attempts(r, RESERVED, replace(RESERVED, index=1))
        ),
    ],
    Rule.SEALED_FIELDS: [
        lambda s: with_record(
            s, "e0p2", lambda r: with_first_attempts(r, replace(RESERVED, receipt="r"))
        ),
    ],
    Rule.STATUS: [
        lambda s: with_record(
            s, "e0p1", lambda r: replace(r, status=PromptGroupStatus.READY_TO_FINALIZE)
        ),
    ],
    Rule.PHASE: [
        lambda s: with_record(
            s,
            "e0p4",
            lambda r: with_first_attempts(
                r, replace(RESERVED, status=RolloutAttemptStatus.DISPATCHED)
            ),
        ),
        lambda s: with_record(s, "e0p4", lambda r: replace(r, admission_id="admission-9")),
    ],
    Rule.ADMISSION: [
        lambda s: with_record(s, "e0p2", lambda r: replace(r, target_step=0)),
    ],
    Rule.STAMPS: [
        lambda s: replace(s, sampler_dispatch_index=0),
        lambda s: with_record(s, "e0p4", lambda r: replace(r, target_step=1)),
        lambda s: replace(s, runtime=replace(s.runtime, sampler_stamps_target_steps=False)),
    ],
    Rule.ROWS: [
        lambda s: replace(s, rows_to_clear=s.rows_to_clear.insert(sample_id_of("e0p0", 0))),
        lambda s: with_rows(s, sample_id_of("e0p1", 0), sample_id_of("e0p0", 1)),
        lambda s: with_rows(s, staged_key("e0p1", 0, 0), sample_id_of("e0p0", 1)),
        lambda s: with_rows(s, sample_id_of("e0p0", 1), sample_id_of("e0p0", 1)),
    ],
    Rule.ROW_COUNTS: [
        lambda s: replace(
            s, replay=s.replay.insert("e0p0", replace(s.replay["e0p0"], lengths=(1,)))
        ),
    ],
    Rule.OPEN_STEP: [
        lambda s: replace(s, open_step=OpenTrainingStep(step=1, group_ids=("e0p1",))),
        lambda s: replace(s, open_step=OpenTrainingStep(step=2, group_ids=("e0p0",))),
        lambda s: replace(s, open_step=OpenTrainingStep(step=1, group_ids=("e0p0", "e0p0"))),
    ],
    Rule.COUNTERS: [
        lambda s: replace(s, next_commit_index=0),
        lambda s: replace(s, progress=replace(s.progress, current_epoch=3)),
        lambda s: replace(s, next_nemo_gym_task_index=-1),
        lambda s: with_record(s, "e0p2", lambda r: replace(r, start_weight_version=5)),
        lambda s: replace(
            s, replay=s.replay.insert("e0p0", replace(s.replay["e0p0"], end_weight_version=-1))
        ),
        lambda s: replace(s, outcomes=s.outcomes.insert("e9p9", Trained(step=4))),
    ],
    Rule.SHORTFALL: [
        lambda s: replace(s, runtime=replace(s.runtime, batch_shortfall=HashTrieMap({9: 1}))),
        lambda s: replace(s, runtime=replace(s.runtime, batch_shortfall=HashTrieMap({0: 0}))),
    ],
    Rule.FINALIZER_VALUES: [
        lambda s: replace(
            s,
            runtime=replace(
                s.runtime,
                finalizer_rewards_by_group=HashTrieMap(
                    {"e0p1": (FinalizedReward(sibling_index=0, reward=1.0),)}
                ),
            ),
        ),
    ],
}


def test_the_base_state_breaks_no_rule_and_every_rule_has_a_case() -> None:
    assert check_invariants(base()) == ()
    assert set(BREAKS) == set(Rule)


@pytest.mark.parametrize("rule", list(Rule))
def test_a_broken_rule_is_noticed(rule: Rule) -> None:
    for damage in BREAKS[rule]:
        violations = check_invariants(damage(base()))
        assert {violation.rule for violation in violations} == {rule}
        assert all(violation.detail for violation in violations)


SEALED = RolloutAttemptRecord(
    index=0,
    status=RolloutAttemptStatus.SEALED,
    receipt="r",
    reward=0.0,
    masked=False,
    staged_keys=("e0p0/0/attempt-0",),
)
DISPATCHED, FAILED, ABANDONED = (
    replace(RESERVED, status=status)
    for status in (
        RolloutAttemptStatus.DISPATCHED,
        RolloutAttemptStatus.FAILED,
        RolloutAttemptStatus.ABANDONED,
    )
)
SEAL = {"receipt": "r", "reward": 0.0, "masked": False, "staged_keys": ("e0p0/0/attempt-0",)}
ATTEMPTS: tuple[tuple[RolloutAttemptRecord, ...], ...] = (
    (),
    (RESERVED,),
    (DISPATCHED,),
    (SEALED,),
    (FAILED,),
    (replace(RESERVED, index=1),),
    *((replace(RESERVED, **{field: value}),) for field, value in SEAL.items()),
    *(
        (replace(SEALED, **{field: () if field == "staged_keys" else None}),)
        for field, value in SEAL.items()
    ),
    *(
        (first, replace(second, index=index))
        for first in (FAILED, ABANDONED, RESERVED, DISPATCHED, SEALED)
        for second, index in ((RESERVED, 1), (SEALED, 1), (FAILED, 1), (RESERVED, 0))
    ),
)


def small_records() -> Iterator[PromptGroupRecoveryRecord]:
    """Records of up to two siblings with up to two attempts, sound ones and others."""
    siblings: list[tuple[RolloutSiblingRecord, ...]] = [()]
    for attempts in ATTEMPTS:
        first = RolloutSiblingRecord(index=0, attempts=attempts)
        siblings += [(first,), (replace(first, index=1),)]
        siblings += [
            (first, RolloutSiblingRecord(index=index, attempts=(other,)))
            for index, other in ((1, RESERVED), (1, SEALED), (0, RESERVED))
        ]
    for each, expected, status, phase, admission_id, version in product(
        siblings,
        (0, 1, 2),
        (PromptGroupStatus.GENERATING, PromptGroupStatus.READY_TO_FINALIZE),
        PromptGroupPhase,
        (None, "admission-0"),
        (None, 0),
    ):
        yield PromptGroupRecoveryRecord(
            group_id="e0p0",
            admission_id=admission_id,
            prompt=prompt(0),
            granularity=RecoveryGranularity.SIBLING,
            expected_generations=expected,
            target_step=None,
            start_weight_version=version,
            phase=phase,
            status=status,
            siblings=each,
        )


def test_what_is_plainly_sound_is_what_there_is_nothing_to_say_of() -> None:
    """`check_invariants` looks into a record with words only where the quick look finds it wanting:
    a mistake in either would let a broken record through, or refuse a sound one."""
    sound = set()
    for record in small_records():
        plainly = _is_plainly_sound("e0p0", record)
        assert plainly is not any(True for _ in _record(record)), record
        if plainly:
            sound.add((record.phase, record.status))
    assert sound == {
        (PromptGroupPhase.RESERVED, PromptGroupStatus.GENERATING),
        (PromptGroupPhase.ADMITTED, PromptGroupStatus.GENERATING),
        (PromptGroupPhase.ADMITTED, PromptGroupStatus.READY_TO_FINALIZE),
    }


def with_attempt(group_id: str, attempt: RolloutAttemptRecord) -> RolloutState:
    """`base` with this first attempt of a group's first sibling."""
    return with_record(base(), group_id, lambda record: with_first_attempts(record, attempt))


@pytest.mark.parametrize("field", SEAL)
def test_a_seal_is_whole_or_not_there(field: str) -> None:
    some = replace(RESERVED, **{field: SEAL[field]})
    whole = replace(SEALED, staged_keys=("e0p1/0/attempt-0",))
    lacking = replace(whole, **{field: getattr(RESERVED, field)})
    assert check_invariants(with_attempt("e0p1", whole)) == ()
    for broken in (with_attempt("e0p2", some), with_attempt("e0p1", lacking)):
        assert Rule.SEALED_FIELDS in {each.rule for each in check_invariants(broken)}


def test_three_names_of_a_group_agree() -> None:
    record = base().ledger.groups["e0p1"]
    for key, named, prompted in product(("e0p1", "e0p2"), repeat=3):
        other = replace(record, group_id=named, prompt=replace(record.prompt, prompt_id=prompted))
        agree = key == named == prompted
        assert _is_plainly_sound(key, other) is agree
        assert any(True for _ in _identity(key, other)) is not agree


def later() -> RolloutState:
    """0 and 1 trained in step 1, 2 and 3 ready, 4 half sealed, 5 admitted with it, 6 reserved."""
    state = after(fresh(stamped=True), reserve(0, 1, 2, 3, 4, 5, 6))
    state = after(state, admit(state, 0, 1))
    state = made_ready(after(state, admit(state, 2, 3)), "e0p0", "e0p1", "e0p2", "e0p3")
    state = after(state, *train(state, "e0p0", "e0p1"))
    state = after(state, admit(state, 4, 5))
    return after(state, dispatch("e0p4", 0), seal("e0p4", 0))


def with_ready(state: RolloutState, group_id: str, **fields: object) -> RolloutState:
    changed = convert({**asdict(state.replay[group_id]), **fields}, ReplayGroup)
    return replace(state, replay=state.replay.insert(group_id, changed))


def with_stamps(state: RolloutState, target_step: int | None) -> RolloutState:
    """Both groups of the batch that is ready stamped anew."""
    state = with_ready(state, "e0p2", target_step=target_step)
    return with_ready(state, "e0p3", target_step=target_step)


def unstamped() -> RolloutState:
    """As `later`, with nothing in flight but what is ready."""
    state = after(fresh(), reserve(0, 1, 2, 3))
    state = after(state, admit(state, 0, 1))
    state = made_ready(after(state, admit(state, 2, 3)), "e0p0", "e0p1", "e0p2", "e0p3")
    return after(state, *train(state, "e0p0", "e0p1"))


def with_version(state: RolloutState, version: int) -> RolloutState:
    return with_record(state, "e0p0", lambda r: replace(r, start_weight_version=version))


def with_progress(state: RolloutState, **fields: int) -> RolloutState:
    return replace(state, progress=replace(state.progress, **fields))


def with_shortfall(state: RolloutState, target_step: int, count: int) -> RolloutState:
    shortfall = HashTrieMap({target_step: count})
    return replace(state, runtime=replace(state.runtime, batch_shortfall=shortfall))


def with_outcome(state: RolloutState, prompt_id: str, outcome: PromptOutcome) -> RolloutState:
    return replace(state, outcomes=state.outcomes.insert(prompt_id, outcome))


def claiming(state: RolloutState) -> RolloutState:
    return after(state, GroupsClaimed(step=2, group_ids=("e0p2", "e0p3")))


def with_spare(state: RolloutState, position: int) -> RolloutState:
    reserve = state.runtime.replacement_reserve.enqueue(prompt(position))
    return replace(state, runtime=replace(state.runtime, replacement_reserve=reserve))


def with_metrics(state: RolloutState, group_id: str) -> RolloutState:
    metrics = HashTrieMap({group_id: HashTrieMap({"length": 1.0})})
    return replace(state, runtime=replace(state.runtime, finalizer_metrics_by_group=metrics))


def stale(step: int) -> Dropped:
    return Dropped(step=step, reason=DropReason.STALE)


EDGES: list[tuple[RolloutState, Rule | None]] = [
    (later(), None),
    (claiming(later()), None),
    # Counters, at the least that they may be and below it.
    (fresh(), None),
    (with_progress(fresh(), train_steps=-1), Rule.COUNTERS),
    (with_progress(fresh(), trainer_version=-1), Rule.COUNTERS),
    (replace(fresh(), sampler_dispatch_index=-2), Rule.COUNTERS),
    (replace(fresh(), next_nemo_gym_task_index=-1), Rule.COUNTERS),
    (replace(fresh(), dataloader_state=at(-1)), Rule.COUNTERS),
    (replace(fresh(), dataloader_state=at(0, epoch=1)), Rule.COUNTERS),
    (replace(later(), next_commit_index=3), Rule.COUNTERS),
    (with_ready(later(), "e0p2", commit_index=0), None),
    (with_ready(later(), "e0p2", commit_index=-1), Rule.COUNTERS),
    (with_ready(later(), "e0p2", commit_index=3), Rule.COUNTERS),
    # Outcomes, from the first step to the last, or for a drop the one under way.
    (with_outcome(later(), "e0p9", Trained(step=0)), Rule.COUNTERS),
    (with_outcome(later(), "e0p9", Trained(step=1)), None),
    (with_outcome(later(), "e0p9", Trained(step=2)), Rule.COUNTERS),
    (with_outcome(later(), "e0p9", stale(0)), Rule.COUNTERS),
    (with_outcome(later(), "e0p9", stale(2)), None),
    (with_outcome(later(), "e0p9", stale(3)), Rule.COUNTERS),
    # Weight versions, from the first to the trainer's.
    (with_record(later(), "e0p5", lambda r: replace(r, start_weight_version=0)), None),
    (with_record(later(), "e0p5", lambda r: replace(r, start_weight_version=-1)), Rule.COUNTERS),
    (with_record(later(), "e0p5", lambda r: replace(r, start_weight_version=2)), Rule.COUNTERS),
    (with_version(admitted(0), 0), None),
    (with_version(admitted(0), 1), Rule.COUNTERS),
    (with_ready(later(), "e0p2", start_weight_version=1, end_weight_version=1), None),
    (with_ready(later(), "e0p2", start_weight_version=2, end_weight_version=2), Rule.COUNTERS),
    (with_ready(later(), "e0p2", start_weight_version=-1), Rule.COUNTERS),
    (with_ready(later(), "e0p2", start_weight_version=1), Rule.COUNTERS),
    # Target steps, from the trainer's version to the cursor.
    (replace(later(), sampler_dispatch_index=1), Rule.STAMPS),
    (with_progress(later(), trainer_version=2), Rule.STAMPS),
    (with_record(later(), "e0p6", lambda r: replace(r, target_step=2)), Rule.STAMPS),
    (with_stamps(later(), None), Rule.STAMPS),
    (with_stamps(unstamped(), None), None),
    (with_stamps(unstamped(), 1), Rule.STAMPS),
    (with_ready(later(), "e0p2", target_step=2), Rule.ADMISSION),
    (with_record(later(), "e0p5", lambda r: replace(r, target_step=1)), Rule.ADMISSION),
    # Shortfalls, of the batches from the next to be trained to the cursor.
    (with_shortfall(later(), 0, 1), Rule.SHORTFALL),
    (with_shortfall(later(), 1, 1), None),
    (with_shortfall(later(), 2, 1), None),
    (with_shortfall(later(), 3, 1), Rule.SHORTFALL),
    (with_shortfall(later(), 1, 0), Rule.SHORTFALL),
    (with_shortfall(claiming(later()), 0, 1), Rule.SHORTFALL),
    (with_shortfall(claiming(later()), 1, 1), None),
    # Names: an entry under another key than that of its prompt.
    (with_ready(later(), "e0p2", prompt=prompt(9)), Rule.KEYS_AGREE),
    # Rows.
    (with_ready(later(), "e0p2", sample_ids=("e0p2/0",)), Rule.ROW_COUNTS),
    (with_ready(later(), "e0p2", lengths=(5,)), Rule.ROW_COUNTS),
    (with_ready(later(), "e0p2", rewards=(1.0,)), Rule.ROW_COUNTS),
    (with_ready(later(), "e0p2", masked=(False,)), Rule.ROW_COUNTS),
    (
        with_ready(later(), "e0p2", sample_ids=(), lengths=(), rewards=(), masked=()),
        Rule.ROW_COUNTS,
    ),
    (replace(later(), rows_to_clear=HashTrieSet(["e0p4/0/attempt-0"])), Rule.ROWS),
    (replace(later(), rows_to_clear=HashTrieSet(["e0p4/0/attempt-1"])), None),
    # Places.
    (with_spare(later(), 9), None),
    (with_spare(later(), 0), Rule.ONE_PLACE),
    (with_spare(later(), 2), Rule.ONE_PLACE),
    (with_spare(later(), 6), Rule.ONE_PLACE),
    (with_spare(with_spare(later(), 9), 9), Rule.ONE_PLACE),
    (with_outcome(later(), "e0p2", stale(1)), Rule.ONE_PLACE),
    (with_metrics(later(), "e0p2"), None),
    (with_metrics(later(), "e0p4"), Rule.FINALIZER_VALUES),
    (with_metrics(later(), "e0p0"), Rule.FINALIZER_VALUES),
]


@pytest.mark.parametrize(("state", "broken"), EDGES, ids=lambda each: "")
def test_a_rule_ends_where_it_says(state: RolloutState, broken: Rule | None) -> None:
    found = {violation.rule for violation in check_invariants(state)}
    assert found == (set() if broken is None else {broken})


def test_a_violation_names_what_breaks_the_rule() -> None:
    broken = with_spare(with_spare(with_spare(later(), 0), 0), 6)
    assert [(each.subject, each.detail) for each in check_invariants(broken)] == [
        ("e0p0", "has 3 places"),
        ("e0p6", "has 2 places"),
    ]
