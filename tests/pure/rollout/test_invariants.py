"""Each rule of `check_invariants` notices a state that breaks it and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from rpds import HashTrieMap

from rollsync.pure.rollout.events import GroupsClaimed
from rollsync.pure.rollout.invariants import Rule, check_invariants
from rollsync.pure.rollout.state import (
    Dropped,
    DropReason,
    FinalizedReward,
    OpenTrainingStep,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutRecoveryLedger,
    RolloutState,
    Trained,
    sample_id_of,
    staged_key,
)
from tests.pure.rollout.events_kit import admit, after, dispatch, fresh, made_ready, reserve, seal


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
