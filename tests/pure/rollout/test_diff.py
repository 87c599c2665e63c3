"""`patch(a, diff(a, b)) == b`, small changes are small, and what is printed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from returns.pipeline import is_successful
from rpds import HashTrieMap, Queue

from rollsync.pure.rollout.diff import MapDiff, ReserveDiff, diff, diff_lines, patch
from rollsync.pure.rollout.events import (
    FinalizationStarted,
    GroupsClaimed,
    OptimizerCommitOpened,
    RowsCleared,
)
from rollsync.pure.rollout.state import FinalizedReward, RolloutState
from rollsync.pure.rollout.transitions import apply
from tests.pure.rollout.events_kit import (
    admit,
    after,
    commit,
    dispatch,
    drop,
    fresh,
    generate,
    made_ready,
    prompt,
    reserve,
    seal,
    spare,
    train,
)
from tests.pure.rollout.test_transitions import any_event


def history() -> list[RolloutState]:
    """A run in which every part of the state changes."""
    states = [fresh(stamped=True)]

    def go(state: RolloutState) -> RolloutState:
        states.append(state)
        return state

    state = go(after(states[0], reserve(0, 1, 2), spare(3, 4)))
    state = go(after(state, admit(state, 0, 1, 2)))
    state = go(after(state, *generate("e0p0"), FinalizationStarted(group_id="e0p0")))
    rewards = (FinalizedReward(sibling_index=1, reward=0.5),)
    final = replace(commit(state, "e0p0"), metrics=(("length", 5.0),), rewards=rewards)
    state = go(after(state, final, dispatch("e0p1", 0), seal("e0p1", 0)))
    state = go(after(state, drop("e0p1", 0), drop("e0p2", 0)))
    state = go(after(state, drop("e0p4", 0)))
    state = go(made_ready(state, "e0p3"))
    state = go(after(state, GroupsClaimed(step=1, group_ids=("e0p0", "e0p3"))))
    state = go(after(state, *train(state, "e0p0", "e0p3")[1:]))
    go(after(state, RowsCleared(keys=tuple(state.rows_to_clear))))
    return states


def test_any_state_of_a_run_can_be_patched_into_any_other() -> None:
    states = history()
    for a in states:
        for b in states:
            assert patch(a, diff(a, b)) == b
            assert diff(a, b).is_empty is (a == b)


def test_equal_records_are_no_difference_whichever_objects_they_are() -> None:
    """States that were read from two files share nothing."""
    state = history()[6]
    copied = replace(
        state,
        ledger=replace(
            state.ledger,
            groups=HashTrieMap({key: replace(each) for key, each in state.ledger.groups.items()}),
        ),
        replay=HashTrieMap({key: replace(each) for key, each in state.replay.items()}),
        outcomes=HashTrieMap({key: replace(each) for key, each in state.outcomes.items()}),
    )
    assert len(copied.replay) == 1
    assert diff(state, copied).is_empty


def test_what_is_put_is_sorted_whatever_the_order_of_a_map() -> None:
    """So that equal differences have equal bytes."""
    names = [f"metric-{number}" for number in range(9)]
    group_ids = [f"e0p{number}" for number in range(9)]
    first = after(fresh(), reserve(*range(9)))
    ready = made_ready(after(first, admit(first, *range(9))), *group_ids)
    metrics = HashTrieMap({each: HashTrieMap(dict.fromkeys(names, 1.0)) for each in group_ids})
    full = replace(ready, runtime=replace(ready.runtime, finalizer_metrics_by_group=metrics))
    there, back = diff(fresh(), full), diff(full, fresh())
    for part in (there.replay, there.finalizer_metrics):
        assert [key for key, _ in part.put] == group_ids
    assert all([name for name, _ in each] == names for _, each in there.finalizer_metrics.put)
    assert back.replay.removed == back.finalizer_metrics.removed == tuple(group_ids)
    for rows in (there.rows_to_clear.added, back.rows_to_clear.removed):
        assert list(rows) == sorted(full.rows_to_clear)


def test_a_small_change_of_a_large_state_is_small() -> None:
    state = after(fresh(), reserve(*range(500)))
    state = after(state, admit(state, *range(500)))
    changed = after(state, dispatch("e0p7", 1))
    found = diff(state, changed)
    assert found.ledger == MapDiff(put=(("e0p7", changed.ledger.groups["e0p7"]),))
    assert replace(found, ledger=MapDiff()).is_empty


def test_the_reserve_is_compared_as_a_queue() -> None:
    state = after(fresh(), spare(0, 1, 2))
    shorter = state.runtime.replacement_reserve.dequeue().enqueue(prompt(3))
    other = replace(state, runtime=replace(state.runtime, replacement_reserve=shorter))
    assert diff(state, other).replacement_reserve == ReserveDiff(taken=1, appended=(prompt(3),))


@given(
    st.lists(st.integers(0, 3), max_size=6).map(lambda ns: tuple(prompt(n) for n in ns)),
    st.lists(st.integers(0, 3), max_size=6).map(lambda ns: tuple(prompt(n) for n in ns)),
)
def test_any_two_reserves(a: tuple[object, ...], b: tuple[object, ...]) -> None:
    base = fresh()

    def holding(prompts: tuple[object, ...]) -> RolloutState:
        queue = Queue([p for p in prompts if isinstance(p, type(prompt(0)))])
        return replace(base, runtime=replace(base.runtime, replacement_reserve=queue))

    assert patch(holding(a), diff(holding(a), holding(b))) == holding(b)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), stamped=st.booleans())
def test_states_of_random_runs(data: st.DataObject, stamped: bool) -> None:
    states = [fresh(stamped=stamped)]
    for _ in range(data.draw(st.integers(1, 20))):
        result = apply(states[-1], data.draw(any_event(states[-1])))
        if is_successful(result):
            states.append(result.unwrap())
    a, b = data.draw(st.sampled_from(states)), data.draw(st.sampled_from(states))
    assert patch(a, diff(a, b)) == b


def test_states_that_break_rules_are_patched_too() -> None:
    a = history()[4]
    wrong_key = replace(a, replay=HashTrieMap({"other": a.replay["e0p0"]}))
    assert patch(a, diff(a, wrong_key)) == wrong_key
    assert patch(wrong_key, diff(wrong_key, a)) == a


def test_what_is_printed() -> None:
    states = history()
    assert diff_lines(diff(states[3], states[3])) == ()
    lines = "\n".join(line for a, b in pairwise(states) for line in diff_lines(diff(a, b)))
    for expected in (
        "dataloader: now at position 5 of epoch 0",
        "dispatch index: now 0",
        "ledger: e0p0 admitted, finalizing, 2 of 2 siblings sealed",
        "replay: + e0p0 weight versions 0 to 0, target step 0",
        "finalizer metrics: + 1 - 0 groups",
        "finalizer rewards: + 1 - 0 groups",
        "rows to clear: + 2 - 0",
        "outcome: e0p1 dropped (unrecoverable) in step 1",
        "reserve: - 2 from its front",
        "shortfall of target step 0: now 1",
        "open training step: now 1, 2 claims",
        "outcome: e0p3 trained in step 1",
        "progress: now 1 training steps, weight version 1, epoch 0",
    ):
        assert expected in lines


def test_what_goes_is_printed_as_what_comes() -> None:
    states = history()
    lines = "\n".join(line for a, b in pairwise(states) for line in diff_lines(diff(b, a)))
    for expected in (
        "open training step: now none",
        "reserve: + e0p3",
        "shortfall of target step 0: now none",
        "rows to clear: + 0 - ",
        "finalizer metrics: + 0 - 1 groups",
        "finalizer rewards: + 0 - 1 groups",
        "ledger: - e0p0",
        "replay: - e0p0",
        "outcome: e0p1 withdrawn",
        "dispatch index: now -1",
        "next commit index: now 0",
    ):
        assert expected in lines
    stamped = diff(fresh(stamped=False), fresh(stamped=True))
    assert diff_lines(stamped) == ("sampler stamps target steps: now True",)
    opened = diff(states[-3], after(states[-3], OptimizerCommitOpened(step=1)))
    assert diff_lines(opened) == ("open training step: now 1, 2 claims, commit window open",)
