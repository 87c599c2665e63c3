"""What events touch, in every small run: nothing else differs, and the part tells as the whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from returns.pipeline import is_successful

from rollsync.pure.rollout.diff import diff, patch
from rollsync.pure.rollout.events import (
    CanonicalDuplicateDiscarded,
    GroupReturnedToReserve,
    ReadyGroupReopened,
    RecoveryRedispatched,
    ReserveDrawn,
    RolloutEvent,
)
from rollsync.pure.rollout.invariants import Rule, check_invariants
from rollsync.pure.rollout.state import RecoveryGranularity, RolloutState, owner_of
from rollsync.pure.rollout.touched import (
    claimed_groups,
    part_of,
    spare_prompts,
    touched_groups,
)
from rollsync.pure.rollout.transitions import apply
from tests.pure.rollout.events_kit import (
    admit,
    dispatch,
    drop,
    fresh,
    generate,
    reserve,
    spare,
    train,
)
from tests.pure.rollout.test_invariants import BREAKS, base
from tests.pure.rollout.test_transitions import any_event


def steps(state: RolloutState) -> list[RolloutEvent]:
    """Events of a small world: some of each kind that may be legal in `state`."""
    position = state.dataloader_state.position
    found: list[RolloutEvent] = []
    if position < 4:
        found += [reserve(position, position + 1), spare(position)]
    found.append(
        ReserveDrawn(count=1, granularity=RecoveryGranularity.SIBLING, expected_generations=2)
    )
    for group_id, record in state.ledger.groups.items():
        number = record.prompt.position
        found += [admit(state, number), *generate(group_id)[:2], dispatch(group_id, 1)]
        found += [drop(group_id, None), drop(group_id, 0)]
        found += [
            GroupReturnedToReserve(group_id=group_id),
            RecoveryRedispatched(group_id=group_id, restart_whole=True),
            CanonicalDuplicateDiscarded(group_id=group_id),
        ]
    for group_id in state.replay:
        found += [*train(state, group_id), drop(group_id, None)]
        found.append(ReadyGroupReopened(group_id=group_id))
    return found


def reached() -> list[tuple[RolloutState, RolloutEvent, RolloutState]]:
    """Every step of a small world, breadth first, some thousands."""
    seen = [fresh()]
    found = []
    for state in seen:
        for event in steps(state):
            result = apply(state, event)
            if is_successful(result):
                found.append((state, event, result.unwrap()))
                if len(seen) < 400:
                    seen.append(result.unwrap())
    return found


def check_part(
    before: RolloutState, after: RolloutState, touched: frozenset[str] | set[str]
) -> None:
    change = diff(before, after)
    assert diff(part_of(before, touched), part_of(after, touched)) == change
    assert patch(before, change) == after


def test_every_step_of_a_small_world_touches_what_it_says() -> None:
    found = reached()
    for before, event, after in found:
        check_part(before, after, set(touched_groups(before, event)))
    kinds = {type(event).__name__ for _, event, _ in found}
    assert kinds >= {"BatchReserved", "ReserveFilled", "ReserveDrawn", "BatchAdmitted"}
    assert kinds >= {"AttemptDispatched", "SiblingSealed", "GroupDropped", "RecoveryRedispatched"}
    assert len(found) > 1000


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stamped=st.booleans())
def test_every_stretch_of_a_random_run_is_told_by_what_it_touched(
    data: st.DataObject, stamped: bool
) -> None:
    """Also: a rule that held before and is broken after is broken in the part (here, in none)."""
    state = first = fresh(stamped=stamped)
    touched: set[str] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        event = data.draw(any_event(state))
        result = apply(state, event)
        if not is_successful(result):
            continue
        touched.update(touched_groups(state, event))
        state = result.unwrap()
        check_part(first, state, touched)
        ids = touched.union(claimed_groups(state), spare_prompts(state))
        assert check_invariants(part_of(state, ids)) == ()
        if data.draw(st.booleans()):
            first, touched = state, set()


def test_a_rule_that_a_group_breaks_is_seen_when_that_group_is_looked_at() -> None:
    """Where the part does not show what the whole state does, it is another group's: one that was
    admitted with it, or that a counter has left behind."""
    sound = base()
    unseen = set()
    for rule, breaks in BREAKS.items():
        for breaking in breaks:
            broken = breaking(sound)
            change = diff(sound, broken)
            ids = {*claimed_groups(broken), *spare_prompts(broken)}
            for part in (change.ledger, change.replay, change.outcomes, change.finalizer_rewards):
                ids.update(key for key, _ in part.put)
                ids.update(part.removed)
            if rule not in {each.rule for each in check_invariants(part_of(broken, ids))}:
                unseen.add(rule)
    assert unseen <= {Rule.ADMISSION, Rule.STAMPS}


def test_a_row_names_its_owner() -> None:
    assert [owner_of(key) for key in ("e0p1/0", "e0p1/0/attempt-2", "x")] == ["e0p1", "e0p1", "x"]
