"""What follows from a fleet's state: who serves, who syncs, when a sync is tried again."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from rollsync.pure.refit.fleet.decisions import (
    EnginesAwaited,
    RetrySync,
    SyncDone,
    SyncGivenUp,
    SyncUnfinished,
    after_failed_attempt,
    after_sync,
    awaits_sync,
    free_slot,
    may_serve,
    may_sync,
    replacements_wanted,
    takes_part,
)
from rollsync.pure.refit.fleet.events import (
    ActorDied,
    EngineJoined,
    EngineStarted,
    EngineSynced,
    EngineSyncFailed,
    FleetEvent,
    ProbeAnswered,
    ProbeMissed,
    SyncClosed,
    SyncStarted,
)
from rollsync.pure.refit.fleet.state import FleetSettings, FleetState, new_fleet
from rollsync.pure.refit.fleet.transitions import apply_to_fleet
from rollsync.pure.refit.lifecycle import (
    Closed,
    Connected,
    EngineState,
    Poisoned,
    Serving,
    Unconnected,
    Updating,
)

A, B, C, D = "engine-0", "engine-1", "engine-2", "engine-3"
ALL = (A, B, C)
STARTED: tuple[FleetEvent, ...] = tuple(map(EngineStarted, ALL))
JOINED: tuple[FleetEvent, ...] = (*STARTED, *map(EngineJoined, ALL))
SYNCED: tuple[FleetEvent, ...] = (
    *JOINED,
    SyncStarted(1, ALL),
    *map(EngineSynced, ALL),
    SyncClosed(),
)
SYNCING: tuple[FleetEvent, ...] = (*SYNCED, SyncStarted(2, ALL))


def fleet(*events: FleetEvent, max_replacements: int = 2) -> FleetState:
    settings = FleetSettings(suspect_after=1, dead_after=3, max_replacements=max_replacements)
    state = new_fleet(settings, wanted=3)
    for event in events:
        state = apply_to_fleet(state, event).unwrap()
    return state


def echo(engine: str) -> EngineSyncFailed:
    return EngineSyncFailed(engine, "another one failed", own=False)


def own(engine: str) -> EngineSyncFailed:
    return EngineSyncFailed(engine, "it failed", own=True)


def test_only_healthy_engines_serve_and_only_their_version() -> None:
    state = fleet(*SYNCED, ProbeMissed(B))
    assert may_serve(state, 1) == (A, C)
    assert may_serve(state, 0) == may_serve(state, 2) == ()
    assert may_serve(fleet(*SYNCING), 1) == ()
    assert may_serve(fleet(*SYNCING, EngineSynced(A)), 2) == (A,)


def test_the_first_sync_waits_for_the_whole_fleet() -> None:
    assert not may_sync(fleet(*STARTED))
    assert not may_sync(fleet(*STARTED, EngineJoined(A)))
    late = fleet(*JOINED)
    assert may_sync(late)
    assert not awaits_sync(late)
    assert takes_part(late) == ALL
    # Later ones do not wait for a replacement.
    assert may_sync(fleet(*SYNCED, ActorDied(A, "killed"), EngineStarted(D)))


def test_engines_take_part_in_the_order_of_their_start_whatever_their_names() -> None:
    names = ("zebra", "engine-10", "engine-9", "ant")
    state = new_fleet(FleetSettings(), wanted=4)
    joined: list[FleetEvent] = [*map(EngineStarted, names), *map(EngineJoined, reversed(names))]
    for event in joined:
        state = apply_to_fleet(state, event).unwrap()
    assert takes_part(state) == names
    replaced: list[FleetEvent] = [
        ActorDied("engine-10", "killed"),
        EngineStarted("bee"),
        EngineJoined("bee"),
    ]
    for event in replaced:
        state = apply_to_fleet(state, event).unwrap()
    assert takes_part(state) == ("zebra", "engine-9", "ant", "bee")


def test_a_suspect_is_not_waited_for_and_syncs_when_it_is_back() -> None:
    state = fleet(*SYNCED, ProbeMissed(B))
    assert takes_part(state) == (A, C)
    for event in (SyncStarted(2, (A, C)), EngineSynced(A), EngineSynced(C), SyncClosed()):
        state = apply_to_fleet(state, event).unwrap()
    assert not awaits_sync(state)
    state = apply_to_fleet(state, ProbeAnswered(B)).unwrap()
    assert awaits_sync(state)
    assert may_serve(state, 2) == (A, C)


def test_a_replacement_serves_only_after_a_sync() -> None:
    state = fleet(*SYNCED, ActorDied(A, "killed"))
    assert replacements_wanted(state) == 1
    state = apply_to_fleet(state, EngineStarted(D)).unwrap()
    assert replacements_wanted(state) == 0
    assert not awaits_sync(state)
    state = apply_to_fleet(state, EngineJoined(D)).unwrap()
    assert awaits_sync(state)
    assert may_serve(state, 1) == (B, C)
    for event in (SyncStarted(1, takes_part(state)), EngineSynced(D)):
        state = apply_to_fleet(state, event).unwrap()
    assert may_serve(state, 1) == (D,)


def test_replacements_come_to_an_end() -> None:
    state = fleet(*SYNCED, ActorDied(A, "killed"), ActorDied(B, "killed"), max_replacements=1)
    assert replacements_wanted(state) == 1
    state = apply_to_fleet(state, EngineStarted(D)).unwrap()
    assert replacements_wanted(state) == 0
    lost = fleet(*SYNCED, *(ActorDied(each, "killed") for each in ALL))
    assert lost.lost is not None
    assert replacements_wanted(lost) == 0
    assert takes_part(lost) == ()


def test_a_sync_that_all_have_loaded_is_done() -> None:
    state = fleet(*SYNCING, EngineSynced(A), EngineSynced(B))
    assert after_sync(state) == SyncUnfinished()
    assert after_sync(apply_to_fleet(state, EngineSynced(C)).unwrap()) == SyncDone(2)


def test_a_sync_goes_on_without_one_that_died_when_the_others_have_the_weights() -> None:
    state = fleet(*SYNCING, EngineSynced(A), EngineSynced(B), ActorDied(C, "killed"))
    assert after_sync(state) == SyncDone(2)
    alive = fleet(*SYNCING, EngineSynced(A), EngineSynced(B), own(C))
    assert after_sync(alive) == SyncDone(2)
    assert awaits_sync(apply_to_fleet(alive, SyncClosed()).unwrap())


def test_a_sync_is_tried_again_without_each_engine_that_broke_it() -> None:
    state = fleet(*SYNCING, echo(A), EngineSynced(B), ActorDied(C, "killed"))
    assert after_sync(state) == RetrySync(2, (A, B))
    for event in (SyncStarted(2, (A, B)), echo(A), own(B)):
        state = apply_to_fleet(state, event).unwrap()
    assert state.sync is not None
    assert state.sync.attempt == 2
    assert after_sync(state) == RetrySync(2, (A,))
    for event in (SyncStarted(2, (A,)), own(A)):
        state = apply_to_fleet(state, event).unwrap()
    assert after_sync(state) == EnginesAwaited()


def test_a_sync_that_no_engine_broke_is_not_tried_again() -> None:
    state = fleet(*SYNCING, *map(echo, ALL))
    given_up = after_sync(state)
    assert isinstance(given_up, SyncGivenUp)
    assert "another one failed" in given_up.why
    assert isinstance(after_sync(fleet(*SYNCED)), SyncGivenUp)


def test_weights_from_before_a_sync_to_the_same_version_do_not_count_as_loaded() -> None:
    """It is for a replacement, and overwrites what the others hold."""
    state = fleet(*SYNCED, SyncStarted(1, ALL))
    assert all(record.version is None for record in state.engines.values())
    assert isinstance(after_sync(fleet(*SYNCED, SyncStarted(1, ALL), *map(echo, ALL))), SyncGivenUp)


def test_a_lost_fleet_syncs_nothing_more() -> None:
    state = fleet(*SYNCING, EngineSynced(A), *(ActorDied(each, "killed") for each in ALL))
    assert isinstance(after_sync(state), SyncGivenUp)
    settings = replace(state.settings, min_healthy=0)
    assert not awaits_sync(replace(state, settings=settings))


def test_a_sync_that_the_trainer_broke_is_not_tried_again_whoever_else_is_to_blame() -> None:
    state = fleet(*SYNCING, echo(A), echo(B), ActorDied(C, "killed"))
    assert after_sync(state, trainer_lost=True) == SyncGivenUp("a policy worker is lost")
    loaded = fleet(*SYNCING, *map(EngineSynced, ALL))
    assert after_sync(loaded, trainer_lost=True) == SyncDone(2)


STATES: tuple[EngineState | None, ...] = (
    None,
    Unconnected(),
    Connected(),
    Updating(2),
    Serving(1),
    Serving(2),
    Poisoned(2, "no memory"),
    Closed(),
)


@pytest.mark.parametrize("state", STATES)
def test_what_an_engine_says_after_a_failed_attempt_is_what_counts(
    state: EngineState | None,
) -> None:
    """Every answer of its step and of its probe, with every state that it may have told before."""
    probes = (None, ProbeMissed(A), ActorDied(A, "its node is gone"))
    for died, missed, to_blame in product((None, "killed"), probes, (False, True)):
        news = after_failed_attempt(
            A, 2, died=died, missed=missed, state=state, to_blame=to_blame, why="another failed"
        )
        expected: FleetEvent
        match died, missed, state:
            case _, ActorDied(), _:
                expected = ActorDied(A, "its node is gone")
            case "killed", _, _:
                expected = ActorDied(A, "killed")
            case _, ProbeMissed(), _:
                expected = EngineSyncFailed(A, "it did not answer after it", own=True)
            case _, None, Serving(2):
                expected = EngineSynced(A)
            case _, None, Poisoned():
                expected = EngineSyncFailed(A, "no memory", own=to_blame)
            case _:
                expected = EngineSyncFailed(A, "another failed", own=to_blame)
        assert news == expected


def test_an_engine_starts_in_the_first_slot_that_no_living_one_has() -> None:
    slots: dict[str, int] = {}
    state = fleet()
    for name in ALL:
        slots[name] = free_slot(state, slots)
        state = apply_to_fleet(state, EngineStarted(name)).unwrap()
    assert slots == {A: 0, B: 1, C: 2}
    state = fleet(*SYNCED, ActorDied(B, "killed"))
    assert free_slot(state, slots) == 1
    slots[D] = 1
    state = fleet(*SYNCED, ActorDied(B, "killed"), EngineStarted(D), ActorDied(A, "killed"))
    assert free_slot(state, slots) == 0
