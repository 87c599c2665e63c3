"""`apply`: what each event does, what it refuses, and that no order of events breaks a rule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from returns.pipeline import is_successful

from rollsync.pure.rollout import errors as refused
from rollsync.pure.rollout.account import account, place_of
from rollsync.pure.rollout.events import (
    AttemptAbandoned,
    AttemptFailed,
    CanonicalDuplicateDiscarded,
    ClaimsReleased,
    FinalizationFailed,
    FinalizationStarted,
    GroupReturnedToReserve,
    GroupsClaimed,
    NemoGymTaskIndexAdvanced,
    OptimizerCommitOpened,
    ReadyGroupReopened,
    RecoveryRedispatched,
    ReserveDrawn,
    RolloutEvent,
    RowsCleared,
    StepCommitted,
)
from rollsync.pure.rollout.invariants import check_invariants
from rollsync.pure.rollout.state import (
    Dropped,
    DropReason,
    FinalizedReward,
    PromptGroupStatus,
    PromptPlace,
    RecoveryGranularity,
    RolloutAttemptStatus,
    RolloutState,
    Trained,
    admission_id_of,
    sample_id_of,
    staged_key,
)
from rollsync.pure.rollout.transitions import apply
from tests.pure.rollout.events_kit import (
    admit,
    admitted,
    after,
    at,
    commit,
    dispatch,
    drop,
    fresh,
    generate,
    made_ready,
    prompt,
    refusal,
    reserve,
    seal,
    spare,
    train,
)


def places(state: RolloutState) -> dict[PromptPlace, int]:
    return {place: count for place, count in account(state).by_place if count}


def test_a_group_goes_from_the_dataloader_to_trained() -> None:
    state = after(fresh(stamped=True), reserve(0, 1))
    assert places(state) == {PromptPlace.RESERVED: 2}
    state = after(state, admit(state, 0, 1))
    assert state.ledger.groups["e0p0"].admission_id == admission_id_of(0)
    assert state.ledger.groups["e0p0"].target_step == 0
    state = made_ready(state, "e0p0", "e0p1")
    assert places(state) == {PromptPlace.READY: 2}
    assert [state.replay[name].commit_index for name in ("e0p0", "e0p1")] == [0, 1]
    state = after(state, GroupsClaimed(step=1, group_ids=("e0p0", "e0p1")))
    assert places(state) == {PromptPlace.CLAIMED: 2}
    state = after(state, OptimizerCommitOpened(step=1), StepCommitted(step=1, trainer_version=1))
    assert dict(state.outcomes) == {"e0p0": Trained(step=1), "e0p1": Trained(step=1)}
    assert (state.progress.train_steps, state.progress.trainer_version) == (1, 1)
    rows = {sample_id_of("e0p0", 0), sample_id_of("e0p1", 1), staged_key("e0p0", 0, 0)}
    assert rows <= set(state.rows_to_clear)
    state = after(state, RowsCleared(keys=tuple(state.rows_to_clear)))
    assert len(state.rows_to_clear) == 0
    assert check_invariants(state) == ()


def test_the_hand_out_has_no_gap_and_no_repetition() -> None:
    state = after(fresh(), reserve(0, 1))
    assert isinstance(refusal(state, reserve(0, 1)), refused.PromptHandedOutTwice)
    assert refusal(state, reserve(3)) == refused.HandOutGap(
        expected_epoch=0, expected_position=2, epoch=0, position=3
    )
    wrong_end = replace(reserve(2), dataloader_after=at(5))
    assert isinstance(refusal(state, wrong_end), refused.HandOutGap)
    other = replace(reserve(2), dataloader_after=replace(at(3), dataset_digest="d1"))
    assert isinstance(refusal(state, other), refused.DatasetChanged)


def test_the_epoch_turns_with_the_dataloader() -> None:
    turn = replace(
        reserve(0), prompts=(prompt(0), prompt(0, epoch=1)), dataloader_after=at(1, epoch=1)
    )
    state = after(fresh(), turn)
    assert state.progress.current_epoch == 1
    back = replace(reserve(1), dataloader_after=at(2))
    assert isinstance(refusal(state, back), refused.HandOutGap)


def test_a_prompt_in_the_reserve_is_not_handed_out_again() -> None:
    state = after(fresh(), spare(0))
    assert place_of(state, "e0p0") is PromptPlace.RESERVE
    assert isinstance(refusal(state, reserve(0)), refused.HandOutGap)
    drawn = ReserveDrawn(count=1, granularity=RecoveryGranularity.SIBLING, expected_generations=2)
    state = after(state, drawn)
    assert place_of(state, "e0p0") is PromptPlace.RESERVED
    assert isinstance(refusal(state, drawn), refused.WrongCount)
    state = after(state, GroupReturnedToReserve(group_id="e0p0"))
    assert place_of(state, "e0p0") is PromptPlace.RESERVE


def test_admission_moves_the_cursor_by_one_and_stamps_by_the_policy() -> None:
    state = after(fresh(stamped=True), reserve(0, 1))
    good = admit(state, 0)
    assert isinstance(refusal(state, replace(good, dispatch_index=1)), refused.CursorJump)
    assert isinstance(refusal(state, replace(good, target_step=None)), refused.WrongTargetStep)
    assert isinstance(
        refusal(state, replace(good, start_weight_version=1)), refused.WrongWeightVersion
    )
    assert isinstance(refusal(state, replace(good, group_ids=("x",))), refused.UnknownGroup)
    twice = replace(good, group_ids=("e0p0", "e0p0"))
    assert refusal(state, twice) == refused.RepeatedIds(ids=("e0p0",))
    state = after(state, replace(good, shortfall=1))
    assert dict(state.runtime.batch_shortfall) == {0: 1}
    assert isinstance(refusal(state, admit(state, 0)), refused.WrongPhase)


def test_attempts_are_contiguous_and_end_once() -> None:
    state = admitted(0)
    assert isinstance(refusal(state, dispatch("e0p0", 0, 1)), refused.UnknownAttempt)
    assert isinstance(refusal(state, dispatch("e0p0", 2)), refused.UnknownSibling)
    assert isinstance(refusal(state, seal("e0p0", 0)), refused.WrongAttemptStatus)
    state = after(state, dispatch("e0p0", 0))
    assert isinstance(refusal(state, dispatch("e0p0", 0)), refused.WrongAttemptStatus)
    failed = AttemptFailed(group_id="e0p0", sibling_index=0, attempt_index=0)
    state = after(state, failed)
    assert isinstance(refusal(state, failed), refused.WrongAttemptStatus)
    assert isinstance(refusal(state, seal("e0p0", 0)), refused.WrongAttemptStatus)
    state = after(state, dispatch("e0p0", 0, 1), seal("e0p0", 0, 1))
    statuses = [each.status for each in state.ledger.groups["e0p0"].siblings[0].attempts]
    assert statuses == [RolloutAttemptStatus.FAILED, RolloutAttemptStatus.SEALED]


def test_sealing_again_with_the_same_data_changes_nothing() -> None:
    state = after(admitted(0), dispatch("e0p0", 0), seal("e0p0", 0))
    assert after(state, seal("e0p0", 0)) is state
    assert refusal(state, seal("e0p0", 0, reward=0.5)) == refused.SealedDifferently(
        group_id="e0p0", sibling_index=0, attempt_index=0, fields=("reward",)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_saved_is_a_finite_number(value: float) -> None:
    state = after(admitted(0), dispatch("e0p0", 0))
    assert isinstance(refusal(state, seal("e0p0", 0, reward=value)), refused.NotFinite)
    state = after(admitted(0), *generate("e0p0"), FinalizationStarted(group_id="e0p0"))
    good = commit(state, "e0p0")
    reward = FinalizedReward(sibling_index=1, reward=value)
    assert isinstance(refusal(state, replace(good, rewards=(reward,))), refused.NotFinite)
    assert refusal(state, replace(good, metrics=(("kl", value),))) == refused.NotFinite(
        group_id="e0p0", what="the metric 'kl'"
    )


def test_a_late_seal_of_an_abandoned_attempt_is_refused() -> None:
    state = after(admitted(0), dispatch("e0p0", 0))
    state = after(state, AttemptAbandoned(group_id="e0p0", sibling_index=0, attempt_index=0))
    state = after(state, dispatch("e0p0", 0, 1))
    assert isinstance(refusal(state, seal("e0p0", 0, 0)), refused.WrongAttemptStatus)


@pytest.mark.parametrize("key", ["other/0", "e0p0", "e0p00/0"])
def test_a_row_key_names_its_owner(key: str) -> None:
    state = after(admitted(0), dispatch("e0p0", 0))
    event = replace(seal("e0p0", 0), staged_keys=(key,))
    assert isinstance(refusal(state, event), refused.RowKeysRefused)


def test_two_siblings_do_not_share_a_row() -> None:
    state = after(admitted(0), dispatch("e0p0", 0), seal("e0p0", 0), dispatch("e0p0", 1))
    stolen = replace(seal("e0p0", 1), staged_keys=(staged_key("e0p0", 0, 0),))
    assert isinstance(refusal(state, stolen), refused.RowKeysRefused)


def test_finalization_of_unknown_outcome_is_settled_either_way() -> None:
    state = after(admitted(0), *generate("e0p0"))
    assert state.ledger.groups["e0p0"].status is PromptGroupStatus.READY_TO_FINALIZE
    assert isinstance(refusal(state, commit(state, "e0p0")), refused.WrongStatus)
    state = after(state, FinalizationStarted(group_id="e0p0"))
    assert isinstance(refusal(state, drop("e0p0", 0)), refused.WrongStatus)
    unknown = after(state, FinalizationFailed(group_id="e0p0", outcome_known=False))
    published = after(unknown, commit(unknown, "e0p0"))
    assert place_of(published, "e0p0") is PromptPlace.READY
    not_published = after(unknown, FinalizationFailed(group_id="e0p0", outcome_known=True))
    assert not_published == after(state, FinalizationFailed(group_id="e0p0", outcome_known=True))


def test_only_ready_groups_are_claimed_and_only_for_their_step() -> None:
    state = after(fresh(stamped=True), reserve(0, 1))
    state = after(state, admit(state, 0))
    state = after(state, admit(state, 1))
    state = made_ready(state, "e0p1")
    assert isinstance(
        refusal(state, GroupsClaimed(step=1, group_ids=("e0p0",))), refused.UnknownGroup
    )
    assert refusal(state, GroupsClaimed(step=1, group_ids=("e0p1",))) == refused.WrongTargetStep(
        group_id="e0p1", target_step=1, needed=0
    )
    assert isinstance(refusal(state, GroupsClaimed(step=2, group_ids=())), refused.StepMismatch)


def test_the_optimizer_commit_window_orders_the_step() -> None:
    state = made_ready(admitted(0), "e0p0")
    commit_step = StepCommitted(step=1, trainer_version=1)
    assert isinstance(refusal(state, commit_step), refused.StepMismatch)
    state = after(state, GroupsClaimed(step=1, group_ids=("e0p0",)))
    assert isinstance(refusal(state, commit_step), refused.OptimizerCommitWindow)
    assert isinstance(refusal(state, GroupsClaimed(step=1, group_ids=())), refused.StepAlreadyOpen)
    assert isinstance(refusal(state, drop("e0p0", 0)), refused.GroupClaimed)
    released = after(state, ClaimsReleased(step=1))
    assert place_of(released, "e0p0") is PromptPlace.READY
    state = after(state, OptimizerCommitOpened(step=1))
    assert isinstance(refusal(state, ClaimsReleased(step=1)), refused.OptimizerCommitWindow)
    skipping = replace(commit_step, trainer_version=2)
    assert isinstance(refusal(state, skipping), refused.WrongWeightVersion)


def test_a_drop_takes_the_reserve_s_first_prompt_into_its_place() -> None:
    state = after(admitted(0, 1, stamped=True), spare(2, 3))
    state = after(state, *generate("e0p0"))
    state = after(state, drop("e0p0", None))
    assert state.outcomes["e0p0"] == Dropped(step=1, reason=DropReason.UNRECOVERABLE)
    replacement = state.ledger.groups["e0p2"]
    assert (replacement.target_step, replacement.admission_id) == (0, admission_id_of(0))
    assert staged_key("e0p0", 0, 0) in state.rows_to_clear
    assert len(state.runtime.batch_shortfall) == 0


def test_a_drop_without_a_spare_is_missed_where_the_trainer_waits() -> None:
    state = admitted(0, 1, stamped=True)
    assert isinstance(refusal(state, drop("e0p0", 1)), refused.ShortfallRefused)
    assert isinstance(refusal(state, drop("e0p0", None)), refused.ShortfallRefused)
    state = after(state, drop("e0p0", 0))
    assert dict(state.runtime.batch_shortfall) == {0: 1}
    state = made_ready(state, "e0p1")
    state = after(state, *train(state, "e0p1"))
    assert len(state.runtime.batch_shortfall) == 0


def test_a_reserved_group_is_dropped_without_a_shortfall() -> None:
    state = after(fresh(), reserve(0))
    assert isinstance(refusal(state, drop("e0p0", 0)), refused.ShortfallRefused)
    assert place_of(after(state, drop("e0p0", None)), "e0p0") is PromptPlace.DROPPED


def test_only_garbage_is_cleared() -> None:
    state = after(admitted(0), dispatch("e0p0", 0), seal("e0p0", 0))
    owned = RowsCleared(keys=(staged_key("e0p0", 0, 0),))
    assert isinstance(refusal(state, owned), refused.RowsNotClearable)


def test_a_resume_keeps_seals_or_restarts_the_group_whole() -> None:
    state = after(admitted(0), dispatch("e0p0", 0), seal("e0p0", 0), dispatch("e0p0", 1))
    kept = after(state, RecoveryRedispatched(group_id="e0p0", restart_whole=False))
    record = kept.ledger.groups["e0p0"]
    assert record.siblings[0] == state.ledger.groups["e0p0"].siblings[0]
    assert [each.status for each in record.siblings[1].attempts] == [
        RolloutAttemptStatus.ABANDONED,
        RolloutAttemptStatus.RESERVED,
    ]
    assert record.recovery_count == 1
    assert (
        after(kept, dispatch("e0p0", 1, 1), seal("e0p0", 1, 1)).ledger.groups["e0p0"].recovery_count
        == 0
    )
    whole = after(state, RecoveryRedispatched(group_id="e0p0", restart_whole=True))
    assert set(whole.rows_to_clear) == {staged_key("e0p0", 0, 0)}
    assert all(
        sibling.attempts[-1].status is RolloutAttemptStatus.RESERVED
        for sibling in whole.ledger.groups["e0p0"].siblings
    )


def test_a_ready_group_can_be_generated_again_in_its_batch() -> None:
    state = made_ready(admitted(0, stamped=True), "e0p0")
    state = after(state, ReadyGroupReopened(group_id="e0p0"))
    record = state.ledger.groups["e0p0"]
    assert (record.target_step, record.status) == (0, PromptGroupStatus.GENERATING)
    assert set(state.rows_to_clear) >= {sample_id_of("e0p0", 0), sample_id_of("e0p0", 1)}
    assert check_invariants(state) == ()


def test_the_ledger_forgets_only_duplicates() -> None:
    state = made_ready(admitted(0, 1), "e0p0")
    event = CanonicalDuplicateDiscarded(group_id="e0p1")
    assert refusal(state, event) == refused.NotCanonical(group_id="e0p1")
    both = replace(state, replay=state.replay.insert("e0p1", state.replay["e0p0"]))
    assert "e0p1" not in after(both, event).ledger.groups


def test_the_environment_s_task_index_never_goes_back() -> None:
    state = after(fresh(), NemoGymTaskIndexAdvanced(next_index=3))
    event = NemoGymTaskIndexAdvanced(next_index=2)
    assert isinstance(refusal(state, event), refused.TaskIndexBackwards)


GROUPS = ("e0p0", "e0p1", "e0p2")


def any_event(state: RolloutState) -> st.SearchStrategy[RolloutEvent]:
    """Any event over three prompts, legal or not."""
    group = st.sampled_from(GROUPS)
    some = st.lists(group, min_size=0, max_size=3).map(tuple)
    small = st.integers(-1, 3)
    next_position = state.dataloader_state.position
    admission = st.builds(
        lambda ids, index, stamp, version, lacking: replace(
            admit(state, 0),
            group_ids=ids,
            dispatch_index=index,
            target_step=stamp,
            start_weight_version=version,
            shortfall=lacking,
        ),
        some,
        st.sampled_from([state.sampler_dispatch_index + 1, 0]),
        st.sampled_from([None, state.sampler_dispatch_index + 1]),
        small,
        small,
    )
    return st.one_of(
        st.builds(lambda n: reserve(*range(next_position, next_position + n)), st.integers(1, 2)),
        st.builds(lambda n: spare(*range(next_position, next_position + n)), st.integers(1, 2)),
        st.builds(
            ReserveDrawn,
            count=small,
            granularity=st.just(RecoveryGranularity.SIBLING),
            expected_generations=st.integers(0, 2),
        ),
        admission,
        st.builds(dispatch, group, small, small),
        st.builds(seal, group, small, small, st.sampled_from([0.0, 1.0])),
        st.builds(AttemptFailed, group_id=group, sibling_index=small, attempt_index=small),
        st.builds(AttemptAbandoned, group_id=group, sibling_index=small, attempt_index=small),
        st.builds(FinalizationStarted, group_id=group),
        st.builds(FinalizationFailed, group_id=group, outcome_known=st.booleans()),
        st.builds(lambda name, n: commit(state, name, n), group, st.integers(0, 2)),
        st.builds(GroupsClaimed, step=small, group_ids=some),
        st.builds(ClaimsReleased, step=small),
        st.builds(OptimizerCommitOpened, step=small),
        st.builds(StepCommitted, step=small, trainer_version=small),
        st.builds(drop, group, st.one_of(st.none(), small)),
        st.builds(GroupReturnedToReserve, group_id=group),
        st.builds(RowsCleared, keys=st.just(tuple(sorted(state.rows_to_clear))[:1])),
        st.builds(RecoveryRedispatched, group_id=group, restart_whole=st.booleans()),
        st.builds(ReadyGroupReopened, group_id=group),
        st.builds(CanonicalDuplicateDiscarded, group_id=group),
        st.builds(NemoGymTaskIndexAdvanced, next_index=small),
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), stamped=st.booleans())
def test_no_order_of_events_raises_or_breaks_a_rule(data: st.DataObject, stamped: bool) -> None:
    state = fresh(stamped=stamped)
    handed_out = 0
    for _ in range(data.draw(st.integers(1, 40))):
        event = data.draw(any_event(state))
        result = apply(state, event)
        if not is_successful(result):
            assert refused.why(result.failure())
            continue
        state = result.unwrap()
        handed_out = state.dataloader_state.position
        assert check_invariants(state) == ()
        assert account(state).handed_out == handed_out
