"""Where prompts are, counted and asked for one by one."""

from __future__ import annotations

from msgspec.structs import replace

from rollsync.pure.rollout.account import account, place_of, places
from rollsync.pure.rollout.events import GroupsClaimed
from rollsync.pure.rollout.state import DropReason, PromptPlace, RolloutState, Trained
from tests.pure.rollout.events_kit import (
    admit,
    after,
    drop,
    fresh,
    made_ready,
    reserve,
    spare,
    train,
)


def one_of_each() -> RolloutState:
    state = after(fresh(), reserve(0, 1, 2, 3, 4))
    state = made_ready(after(state, admit(state, 0, 1, 2, 3)), "e0p0", "e0p1", "e0p2")
    state = after(state, *train(state, "e0p0"))
    state = after(state, GroupsClaimed(step=2, group_ids=("e0p1",)), drop("e0p4", None))
    return after(state, reserve(5), spare(6))


def test_every_place_is_found() -> None:
    state = one_of_each()
    assert {place: place_of(state, name) for name, place in places(state)} == {
        place: place for place in PromptPlace
    }
    found = account(state)
    assert found.by_place == tuple((place, 1) for place in PromptPlace)
    assert found.handed_out == state.dataloader_state.position == 7
    assert dict(found.dropped_by_reason)[DropReason.UNRECOVERABLE] == 1
    assert found.in_two_places == ()
    assert place_of(state, "e0p7") is None


def test_two_places_are_noticed() -> None:
    state = one_of_each()
    twice = replace(state, outcomes=state.outcomes.insert("e0p2", Trained(step=1)))
    assert account(twice).in_two_places == ("e0p2",)


def test_a_change_of_one_group_leaves_the_others_alone() -> None:
    state = one_of_each()
    changed = after(state, drop("e0p5", None))
    assert set(changed.ledger.groups) == {"e0p3", "e0p6"}
    assert changed.ledger.groups["e0p3"] is state.ledger.groups["e0p3"]
    for name, group in changed.replay.items():
        assert group is state.replay[name]
