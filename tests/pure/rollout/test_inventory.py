"""The one check of state against rows that saving and restoring share."""

from __future__ import annotations

from msgspec.structs import replace

from rollsync.pure.rollout.inventory import (
    BatchesUnaccounted,
    CapacityTooSmall,
    InventoryProblem,
    RowsMissing,
    RowsUnowned,
    RuleBroken,
    StampingDiffers,
    describe_problem,
    owned_rows,
    restoring_problems,
    saving_problems,
    take_inventory,
)
from rollsync.pure.rollout.sampler import InOrderSampler, PromptGroupSampler, ReadyFirstSampler
from rollsync.pure.rollout.state import RolloutState, sample_id_of, staged_key
from tests.pure.rollout.events_kit import admitted, after, dispatch, made_ready, seal


def problems(
    state: RolloutState,
    *rows: str,
    sampler: PromptGroupSampler | None = None,
    batch: int = 2,
    capacity: int | None = None,
) -> tuple[InventoryProblem, ...]:
    return restoring_problems(
        take_inventory(state, rows),
        state,
        sampler=ReadyFirstSampler() if sampler is None else sampler,
        num_prompts_per_step=batch,
        buffer_capacity=capacity,
    )


def half_done() -> RolloutState:
    state = made_ready(admitted(0, 1), "e0p0")
    return after(state, dispatch("e0p1", 0), seal("e0p1", 0))


def test_a_state_with_exactly_its_rows_has_no_problem() -> None:
    state = half_done()
    assert owned_rows(state) == (
        sample_id_of("e0p0", 0),
        sample_id_of("e0p0", 1),
        staged_key("e0p1", 0, 0),
    )
    assert problems(state, *owned_rows(state), capacity=4) == ()


def test_missing_rows_are_named_with_their_group() -> None:
    state = half_done()
    found = problems(state, sample_id_of("e0p0", 0))
    assert found == (
        RowsMissing(group_id="e0p0", keys=(sample_id_of("e0p0", 1),)),
        RowsMissing(group_id="e0p1", keys=(staged_key("e0p1", 0, 0),)),
    )
    assert saving_problems(take_inventory(state, (sample_id_of("e0p0", 0),))) == found
    assert describe_problem(found[0]) == "group e0p0 owns rows that are not there: e0p0/1"


def test_unowned_rows_are_a_problem_of_restoring_only() -> None:
    state = half_done()
    inventory = take_inventory(state, (*owned_rows(state), "e0p9/0"))
    assert saving_problems(inventory) == ()
    extra = RowsUnowned(keys=("e0p9/0",))
    assert problems(state, *owned_rows(state), "e0p9/0") == (extra,)
    assert describe_problem(extra) == "rows that no group owns: e0p9/0"


def test_rows_that_wait_to_be_cleared_are_no_problem_while_the_run_goes_on() -> None:
    state = half_done()
    garbage = staged_key("e0p0", 0, 0)
    assert garbage in state.rows_to_clear
    assert take_inventory(state, (*owned_rows(state), garbage)).unowned == ()


def test_a_smaller_buffer_is_an_error_that_says_what_to_raise() -> None:
    state = half_done()
    found = problems(state, *owned_rows(state), capacity=1)
    assert found == (CapacityTooSmall(needed=4, capacity=1),)
    assert "raise the buffer capacity to at least 4" in describe_problem(found[0])


def test_another_batch_size_or_kind_of_sampler_is_an_error() -> None:
    state = half_done()
    rows = owned_rows(state)
    found = problems(state, *rows, batch=3)
    assert found == (BatchesUnaccounted(difference=-1, num_prompts_per_step=3),)
    assert "num_prompts_per_step" in describe_problem(found[0])
    found = problems(state, *rows, sampler=InOrderSampler())
    assert found == (StampingDiffers(state_stamps=False),)
    assert "does not stamp" in describe_problem(found[0])


def test_a_state_that_contradicts_itself_is_refused() -> None:
    state = half_done()
    broken = replace(state, sampler_dispatch_index=-2)
    found = problems(broken, *owned_rows(state))
    assert any(isinstance(each, RuleBroken) for each in found)
    assert all(describe_problem(each) for each in found)


def test_of_many_rows_some_are_named_and_the_others_counted() -> None:
    for count, listed in ((5, "r0, r1, r2, r3, r4"), (7, "r0, r1, r2, r3, r4 and 2 more")):
        problem = RowsUnowned(keys=tuple(f"r{number}" for number in range(count)))
        assert describe_problem(problem) == f"rows that no group owns: {listed}"


def test_rows_are_listed_in_order_whatever_the_order_of_groups() -> None:
    positions = range(12)
    state = admitted(*positions)
    state = made_ready(state, *(f"e0p{position}" for position in positions if position % 2))
    for position in positions:
        if position % 2 == 0:
            state = after(state, dispatch(f"e0p{position}", 0), seal(f"e0p{position}", 0))
    strangers = [f"other{number}" for number in reversed(range(9))]
    inventory = take_inventory(state, strangers)
    assert owned_rows(state) == tuple(sorted(owned_rows(state)))
    assert inventory.replay_rows == tuple(sorted(inventory.replay_rows))
    assert inventory.staging_rows == tuple(sorted(inventory.staging_rows))
    assert set(owned_rows(state)) == {*inventory.replay_rows, *inventory.staging_rows}
    assert inventory.unowned == tuple(sorted(strangers))
    assert [each.group_id for each in inventory.missing] == sorted(
        f"e0p{position}" for position in positions
    )
    assert (inventory.admitted_group_count, inventory.replay_group_count) == (6, 6)


def test_groups_too_many_and_too_few_are_told_apart() -> None:
    more, fewer = (
        describe_problem(BatchesUnaccounted(difference=difference, num_prompts_per_step=3))
        for difference in (1, -1)
    )
    assert "there are 1 groups more than batches of 3 account for" in more
    assert "there are 1 groups fewer than batches of 3 account for" in fewer
