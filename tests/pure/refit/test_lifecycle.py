"""The engine's life cycle: every event in every state, and every short life."""

from __future__ import annotations

from itertools import product

import pytest
from returns.pipeline import is_successful

from rollsync.pure.refit import describe, lifecycle
from rollsync.pure.refit.errors import (
    AnotherVersion,
    EventRefused,
    NotConnected,
    ServesAnotherVersion,
    ServesNothing,
)
from rollsync.pure.refit.lifecycle import (
    TRANSITIONS,
    BeginUpdate,
    Close,
    Closed,
    Connect,
    Connected,
    Disconnect,
    EngineEvent,
    EngineState,
    EventKind,
    FinishUpdate,
    Phase,
    Poisoned,
    Serving,
    Unconnected,
    UpdateFailed,
    Updating,
    apply,
    check_serves,
    kind_of,
    next_version,
    phase_of,
)

STATES: list[EngineState] = [
    Unconnected(),
    Connected(),
    Updating(1),
    Serving(1),
    Serving(1, connected=False),
    Poisoned(1, "why"),
    Poisoned(1, "why", connected=False),
    Closed(),
]
EVENTS: list[EngineEvent] = [
    Connect(),
    BeginUpdate(1),
    BeginUpdate(2),
    FinishUpdate(1),
    FinishUpdate(2),
    UpdateFailed("later"),
    Disconnect(),
    Close(),
]


def after(*events: EngineEvent) -> EngineState:
    state: EngineState = Unconnected()
    for event in events:
        state = apply(state, event).unwrap()
    return state


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)))
def test_every_event_in_every_state_does_what_the_table_says(
    state: EngineState, event: EngineEvent
) -> None:
    phase, kind = phase_of(state), kind_of(event)
    result = apply(state, event)
    if kind not in TRANSITIONS[phase]:
        assert result.failure() == EventRefused(phase=phase, event=kind)
        assert phase in describe(result.failure())
    elif is_successful(result):
        assert phase_of(result.unwrap()) == TRANSITIONS[phase][kind]
    else:
        error = result.failure()
        assert isinstance(error, NotConnected | AnotherVersion)


def test_the_table_is_the_one_that_the_module_shows() -> None:
    shown: dict[str, dict[str, str]] = {}
    lines = (lifecycle.__doc__ or "").splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["phase"])
    columns = lines[start].split()[1:]
    for line in lines[start + 1 : start + 1 + len(Phase)]:
        phase, *cells = line.split()
        shown[phase] = {
            column: cell for column, cell in zip(columns, cells, strict=True) if cell != "-"
        }
    assert shown == {
        str(p): {str(k): str(to) for k, to in row.items()} for p, row in TRANSITIONS.items()
    }
    assert columns == [str(kind) for kind in EventKind]


def test_only_a_whole_update_leads_to_serving() -> None:
    """Every life of up to six events, from the start."""
    lives: dict[EngineState, int | None] = {Unconnected(): None}
    for _ in range(6):
        grown: dict[EngineState, int | None] = dict(lives)
        for state, event in product(lives, EVENTS):
            result = apply(state, event)
            if not is_successful(result):
                continue
            new = result.unwrap()
            if isinstance(new, Serving) and not isinstance(state, Serving):
                assert isinstance(state, Updating)
                assert isinstance(event, FinishUpdate)
                assert state.version == event.version == new.version
            if isinstance(new, Serving) and isinstance(state, Serving):
                assert new.version == state.version
            if isinstance(state, Poisoned):
                assert isinstance(new, Poisoned | Updating | Closed)
            if isinstance(state, Closed):
                assert new == Closed()
            grown[new] = None
        lives = grown
    assert {phase_of(state) for state in lives} == set(Phase)


@pytest.mark.parametrize("state", STATES)
def test_only_serving_may_generate(state: EngineState) -> None:
    error = check_serves(state)
    if isinstance(state, Serving):
        assert error is None
        assert check_serves(state, 1) is None
        assert check_serves(state, 2) == ServesAnotherVersion(serving=1, wanted=2)
        assert check_serves(state, 0) == ServesAnotherVersion(serving=1, wanted=0)
    else:
        cause = "why" if isinstance(state, Poisoned) else ""
        assert error == ServesNothing(phase=phase_of(state), cause=cause)
        assert "sync the weights" in describe(error)


def test_release_after_every_sync_keeps_the_engine_serving() -> None:
    state = after(Connect(), BeginUpdate(0), FinishUpdate(0), Disconnect())
    assert state == Serving(0, connected=False)
    assert check_serves(state, 0) is None
    refused = apply(state, BeginUpdate(1)).failure()
    assert refused == NotConnected(phase=Phase.SERVING)
    assert "connect again" in describe(refused)
    assert apply(apply(state, Connect()).unwrap(), BeginUpdate(1)).unwrap() == Updating(1)


def test_a_failed_update_is_poison_until_a_whole_one() -> None:
    state = after(
        Connect(), BeginUpdate(3), FinishUpdate(3), BeginUpdate(4), UpdateFailed("receiver died")
    )
    assert state == Poisoned(4, "receiver died")
    assert apply(state, UpdateFailed("and then")).unwrap() == state
    again = after(
        Connect(), BeginUpdate(4), UpdateFailed("x"), Disconnect(), Connect(), BeginUpdate(4)
    )
    assert apply(again, FinishUpdate(4)).unwrap() == Serving(4)


@pytest.mark.parametrize("connected", [True, False])
def test_an_update_that_fails_before_its_first_weight_is_poison_too(connected: bool) -> None:
    """What is held is whole, and is not what the policy meant it to hold. Meanwhile the connection
    may have been given back."""
    failed = apply(Serving(3, connected=connected), UpdateFailed("nobody came")).unwrap()
    assert failed == Poisoned(4, "nobody came", connected=connected)
    assert after(Connect(), UpdateFailed("nobody came")) == Poisoned(0, "nobody came")
    assert after(UpdateFailed("nobody came")) == Unconnected()


def test_an_update_that_names_no_version_is_the_next_one() -> None:
    versions = [next_version(state) for state in STATES]
    assert versions == [0, 0, 2, 2, 2, 2, 2, 0]


def test_losing_the_connection_in_the_middle_is_poison() -> None:
    state = after(Connect(), BeginUpdate(3), Disconnect())
    assert isinstance(state, Poisoned)
    assert not state.connected
    assert "connection" in state.cause


def test_an_update_ends_under_the_version_it_began_with() -> None:
    error = apply(Updating(3), FinishUpdate(4)).failure()
    assert error == AnotherVersion(updating=3, finished=4)
    assert "3" in describe(error)


def test_shutting_down_twice_is_no_mistake() -> None:
    assert after(Close(), Close(), Disconnect()) == Closed()
    assert after(Disconnect(), Disconnect()) == Unconnected()
