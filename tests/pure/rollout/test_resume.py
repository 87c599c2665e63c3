"""`plan_resume` and `explain`: what happens to each group, in which order, and why."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec.structs import replace

from rollsync.pure.rollout.account import account, place_of
from rollsync.pure.rollout.events import (
    AttemptDispatched,
    AttemptFailed,
    FinalizationStarted,
    GroupsClaimed,
)
from rollsync.pure.rollout.explain import explain
from rollsync.pure.rollout.invariants import check_invariants
from rollsync.pure.rollout.inventory import owned_rows
from rollsync.pure.rollout.resume import (
    DiscardedAsCanonical,
    DroppedAsUnrecoverable,
    GroupPlan,
    KeptReady,
    Readmitted,
    ReadyRegenerated,
    ReservedGroups,
    RestartedWhole,
    ResumePolicy,
    ReturnedToReserve,
    SiblingsResumed,
    plan_resume,
)
from rollsync.pure.rollout.sampler import (
    InOrderSampler,
    PromptGroupSampler,
    ReadyFirstSampler,
    WindowedSampler,
)
from rollsync.pure.rollout.state import (
    Dropped,
    DropReason,
    PromptPlace,
    RecoveryGranularity,
    RolloutState,
    Trained,
    staged_key,
)
from tests.pure.rollout.events_kit import (
    admit,
    admitted,
    after,
    dispatch,
    fresh,
    generate,
    made_ready,
    reserve,
    seal,
    spare,
    train,
)
from tests.pure.rollout.test_sampler import limits


def policy(
    *,
    sampler: PromptGroupSampler | None = None,
    load_buffer: bool = True,
    reserved: ReservedGroups = ReservedGroups.READMIT,
    max_recoveries: int = 8,
) -> ResumePolicy:
    return ResumePolicy(
        sampler=ReadyFirstSampler() if sampler is None else sampler,
        limits=limits(),
        load_buffer=load_buffer,
        reserved=reserved,
        max_recoveries=max_recoveries,
    )


def in_flight() -> RolloutState:
    """0 ready, 1 half sealed, 2 running, 3 all sealed, 4 reserved; batches (0, 1) and (2, 3)."""
    state = after(fresh(stamped=True), reserve(0, 1, 2, 3, 4))
    state = after(state, admit(state, 0, 1))
    state = made_ready(after(state, admit(state, 2, 3)), "e0p0")
    return after(
        state,
        *(dispatch("e0p1", 0), seal("e0p1", 0), dispatch("e0p1", 1)),
        dispatch("e0p2", 0),
        *generate("e0p3"),
    )


def test_each_group_is_resumed_by_what_is_left_of_it() -> None:
    plan = plan_resume(in_flight(), policy(sampler=InOrderSampler()))
    assert plan.groups == (
        SiblingsResumed(group_id="e0p1", sealed=(0,), regenerate=(1,)),
        SiblingsResumed(group_id="e0p2", sealed=(), regenerate=(0, 1)),
        SiblingsResumed(group_id="e0p3", sealed=(0, 1), regenerate=()),
        Readmitted(group_id="e0p4"),
        KeptReady(group_id="e0p0"),
    )
    assert plan.dispatches == (
        AttemptDispatched(group_id="e0p1", sibling_index=1, attempt_index=1),
        AttemptDispatched(group_id="e0p2", sibling_index=0, attempt_index=1),
        AttemptDispatched(group_id="e0p2", sibling_index=1, attempt_index=0),
    )
    assert plan.to_finalize == ("e0p3",)
    assert plan.readmissions == ("e0p4",)
    assert plan.state == after(in_flight(), *plan.events)
    assert plan.rows_to_load == owned_rows(plan.state)
    assert len(plan.state.rows_to_clear) == 0
    assert check_invariants(after(plan.state, *plan.dispatches)) == ()


def test_the_earliest_target_step_comes_first_whenever_it_was_handed_out() -> None:
    state = after(fresh(stamped=True), reserve(0, 1, 2, 3))
    state = after(state, admit(state, 2, 3))
    state = after(state, admit(state, 0, 1))
    plan = plan_resume(state, policy(sampler=InOrderSampler()))
    order = ["e0p2", "e0p3", "e0p0", "e0p1"]
    assert [group.group_id for group in plan.groups] == order
    assert [each.group_id for each in plan.dispatches] == [each for each in order for _ in "ab"]


def test_the_oldest_weights_come_first_where_no_step_is_stamped() -> None:
    state = after(fresh(), reserve(0, 1, 2, 3))
    state = made_ready(after(state, admit(state, 1, 2)), "e0p2")
    state = after(state, *train(state, "e0p2"))
    state = after(state, admit(state, 0, 3))
    plan = plan_resume(state, policy())
    assert [group.group_id for group in plan.groups] == ["e0p1", "e0p0", "e0p3"]


def test_no_prompt_changes_its_place_in_an_ordinary_resume() -> None:
    state = in_flight()
    plan = plan_resume(state, policy(sampler=InOrderSampler()))
    assert account(plan.state) == account(state)


def test_a_prompt_group_is_restarted_whole() -> None:
    batch = replace(reserve(0), granularity=RecoveryGranularity.PROMPT_GROUP)
    state = after(fresh(), batch)
    state = after(state, admit(state, 0), dispatch("e0p0", 0), seal("e0p0", 0))
    plan = plan_resume(state, policy())
    assert plan.groups == (RestartedWhole(group_id="e0p0", discarded=(0,)),)
    assert plan.rows_to_load == ()
    assert [each.sibling_index for each in plan.dispatches] == [0, 1]


def test_a_prompt_group_that_has_all_its_siblings_goes_to_finalization() -> None:
    batch = replace(reserve(0), granularity=RecoveryGranularity.PROMPT_GROUP)
    state = after(fresh(), batch)
    state = after(state, admit(state, 0), *generate("e0p0"))
    plan = plan_resume(state, policy())
    assert plan.groups == (SiblingsResumed(group_id="e0p0", sealed=(0, 1), regenerate=()),)
    assert plan.to_finalize == ("e0p0",)
    assert plan.events == ()


def test_a_poison_prompt_that_has_all_its_siblings_is_not_dropped() -> None:
    state = after(admitted(0), *generate("e0p0"))
    plan = plan_resume(state, policy(max_recoveries=0))
    assert plan.to_finalize == ("e0p0",)


def test_an_unloaded_buffer_is_generated_again_in_its_batches() -> None:
    state = made_ready(admitted(0, 1, stamped=True), "e0p0", "e0p1")
    plan = plan_resume(state, policy(sampler=InOrderSampler(), load_buffer=False))
    assert plan.groups == (
        ReadyRegenerated(group_id="e0p0"),
        ReadyRegenerated(group_id="e0p1"),
    )
    assert {record.target_step for record in plan.state.ledger.groups.values()} == {0}
    assert plan.rows_to_load == ()


class Forgetful(WindowedSampler, frozen=True, kw_only=True, tag="forgetful"):
    """A user's policy that cannot go on with groups that it did not see come."""

    @property
    def supports_buffer_checkpoint(self) -> bool:
        return False


def test_a_policy_that_supports_no_buffer_has_it_generated_again() -> None:
    state = made_ready(admitted(0, 1), "e0p0", "e0p1")
    kinds = {type(group) for group in plan_resume(state, policy(sampler=Forgetful())).groups}
    assert kinds == {ReadyRegenerated}


def test_open_claims_are_rolled_back() -> None:
    state = made_ready(admitted(0), "e0p0")
    claimed = after(state, GroupsClaimed(step=1, group_ids=("e0p0",)))
    assert plan_resume(claimed, policy()).state.open_step is None


def test_reserved_groups_can_become_spares() -> None:
    state = after(fresh(), reserve(0, 1))
    plan = plan_resume(state, policy(reserved=ReservedGroups.RETURN_TO_RESERVE))
    assert plan.groups == (
        ReturnedToReserve(group_id="e0p0"),
        ReturnedToReserve(group_id="e0p1"),
    )
    assert place_of(plan.state, "e0p1") is PromptPlace.RESERVE


def test_a_poison_prompt_is_dropped_after_a_bounded_number_of_resumes() -> None:
    state = after(admitted(0, 1), dispatch("e0p0", 0), spare(2))
    settings = policy(max_recoveries=3)
    for count in range(3):
        plan = plan_resume(state, settings)
        assert plan.state.ledger.groups["e0p0"].recovery_count == count + 1
        state = after(plan.state, *plan.dispatches)
    plan = plan_resume(state, settings)
    dropped = DroppedAsUnrecoverable(group_id="e0p0", recovery_count=3, failed_attempts=0)
    assert dropped in plan.groups
    assert plan.state.outcomes["e0p0"] == Dropped(step=1, reason=DropReason.UNRECOVERABLE)
    assert place_of(plan.state, "e0p2") is PromptPlace.ADMITTED
    assert "e0p2" in {each.group_id for each in plan.dispatches}


def test_a_replacement_made_by_a_resume_starts_on_the_anchor_s_weights() -> None:
    state = made_ready(admitted(0), "e0p0")
    state = after(state, *train(state, "e0p0"), reserve(1), spare(2))
    state = after(state, admit(state, 1), dispatch("e0p1", 0))
    plan = plan_resume(state, policy(max_recoveries=0))
    assert plan.state.ledger.groups["e0p2"].start_weight_version == 1


def test_a_long_group_that_makes_progress_is_never_taken_for_poison() -> None:
    state = admitted(0, siblings=6)
    settings = policy(max_recoveries=2)
    for sibling in range(6):
        for _ in range(2):
            plan = plan_resume(state, settings)
            state = after(plan.state, *plan.dispatches)
        last = state.ledger.groups["e0p0"].siblings[sibling].attempts[-1].index
        state = after(state, seal("e0p0", sibling, last))
    assert place_of(state, "e0p0") is PromptPlace.ADMITTED


def test_a_group_of_which_nothing_has_to_be_begun_anew_needs_no_event() -> None:
    """Nothing of it was running: its attempts are reserved still, or sealed."""
    assert plan_resume(admitted(0), policy()).events == ()
    sealed = after(admitted(0), dispatch("e0p0", 0), seal("e0p0", 0))
    assert plan_resume(sealed, policy()).events == ()


def test_groups_that_never_ran_are_not_suspected() -> None:
    state = admitted(0)
    for _ in range(5):
        state = plan_resume(state, policy(max_recoveries=1)).state
    assert state.ledger.groups["e0p0"].recovery_count == 0


def test_failed_attempts_are_bounded_across_resumes() -> None:
    state = admitted(0)
    for attempt in range(3):
        state = after(
            state,
            dispatch("e0p0", 0, attempt),
            AttemptFailed(group_id="e0p0", sibling_index=0, attempt_index=attempt),
        )
    plan = plan_resume(state, policy())
    assert plan.groups == (
        DroppedAsUnrecoverable(group_id="e0p0", recovery_count=0, failed_attempts=3),
    )


@pytest.mark.parametrize("place", [PromptPlace.READY, PromptPlace.TRAINED])
def test_a_ledger_group_that_has_another_place_is_discarded(place: PromptPlace) -> None:
    state = made_ready(admitted(0), "e0p0")
    stale = after(admitted(0), dispatch("e0p0", 0), seal("e0p0", 0)).ledger
    if place is PromptPlace.TRAINED:
        state = after(state, *train(state, "e0p0"))
        assert state.outcomes["e0p0"] == Trained(step=1)
    damaged = replace(state, ledger=stale)
    assert check_invariants(damaged) != ()
    plan = plan_resume(damaged, policy())
    assert DiscardedAsCanonical(group_id="e0p0", place=place) in plan.groups
    assert check_invariants(plan.state) == ()
    assert staged_key("e0p0", 0, 0) not in plan.rows_to_load


def test_an_unsettled_finalization_from_elsewhere_is_finalized_again() -> None:
    state = after(admitted(0), *generate("e0p0"), FinalizationStarted(group_id="e0p0"))
    assert plan_resume(state, policy()).to_finalize == ("e0p0",)


def test_a_resume_of_a_resume_is_the_same_resume() -> None:
    once = plan_resume(in_flight(), policy(sampler=InOrderSampler())).state
    twice = plan_resume(once, policy(sampler=InOrderSampler())).state
    assert twice == once


def test_each_kind_of_plan_is_put_into_words() -> None:
    kinds: dict[GroupPlan, str] = {
        KeptReady(group_id="g"): "g: kept as ready (its rows are loaded)",
        ReadyRegenerated(group_id="g"): (
            "g: generated again (it was ready, and the buffer is not loaded)"
        ),
        SiblingsResumed(group_id="g", sealed=(0, 2, 5), regenerate=(1,)): (
            "g: resumed (siblings 0, 2 and 5 kept, sibling 1 generated again)"
        ),
        RestartedWhole(group_id="g", discarded=()): (
            "g: restarted whole (recovered by prompt group; sealed and discarded: no sibling)"
        ),
        Readmitted(group_id="g"): (
            "g: admitted again (it was reserved, and no batch counts it yet)"
        ),
        ReturnedToReserve(group_id="g"): (
            "g: returned to the reserve (it was reserved, and reserved prompts become spares)"
        ),
        DiscardedAsCanonical(group_id="g", place=PromptPlace.TRAINED): (
            "g: discarded as already canonical (its prompt is trained already)"
        ),
        DroppedAsUnrecoverable(group_id="g", recovery_count=8, failed_attempts=1): (
            "g: dropped as unrecoverable (8 resumes found it running without progress, "
            "1 attempts of a sibling failed)"
        ),
    }
    assert {type(kind) for kind in kinds} == set(get_args(GroupPlan))
    empty = plan_resume(fresh(), policy())
    assert explain(empty)[1] == "0 groups: none"
    lines = explain(replace(empty, groups=tuple(kinds)))
    assert [line.strip() for line in lines[3:]] == list(kinds.values())


def test_the_explanation_names_every_group_and_says_why() -> None:
    state = in_flight()
    lines = explain(plan_resume(state, policy(sampler=InOrderSampler())))
    text = "\n".join(lines)
    assert "5 groups: 1 admitted again, 1 kept as ready, 3 resumed" in text
    assert "e0p1: resumed (sibling 0 kept, sibling 1 generated again)" in text
    assert "next prompt: position 5 of epoch 0" in text
    assert len(lines) == 3 + 5
