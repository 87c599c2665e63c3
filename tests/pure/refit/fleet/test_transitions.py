"""The fleet's table: every event in every phase, the counts, and what a sync changes."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace
from returns.pipeline import is_successful

from rollsync.pure.refit.fleet.errors import (
    EngineStartedTwice,
    EngineUnknown,
    FleetEventRefused,
    SyncRefused,
    describe_fleet_error,
)
from rollsync.pure.refit.fleet.events import (
    ActorDied,
    EngineJoined,
    EngineNews,
    EngineStarted,
    EngineSynced,
    EngineSyncFailed,
    FleetEvent,
    ProbeAnswered,
    ProbeMissed,
    RequestAnswered,
    RequestFailed,
    RequestRefused,
    SyncClosed,
    SyncStarted,
    fleet_event_kind,
)
from rollsync.pure.refit.fleet.state import (
    EnginePhase,
    EngineRecord,
    FleetSettings,
    FleetState,
    new_fleet,
)
from rollsync.pure.refit.fleet.transitions import FLEET_TRANSITIONS, apply_to_fleet

A, B = "engine-0", "engine-1"
SETTINGS = FleetSettings(suspect_after=1, dead_after=2)


def fleet(*events: FleetEvent, settings: FleetSettings = SETTINGS, wanted: int = 2) -> FleetState:
    state = new_fleet(settings, wanted=wanted)
    for event in events:
        state = apply_to_fleet(state, event).unwrap()
    return state


JOINED = (EngineStarted(A), EngineStarted(B), EngineJoined(A), EngineJoined(B))
SYNCED = (
    *JOINED,
    SyncStarted(1, (A, B)),
    EngineSynced(A),
    EngineSynced(B),
    SyncClosed(),
)
IN_PHASE: dict[EnginePhase, FleetState] = {
    EnginePhase.JOINING: fleet(EngineStarted(A), EngineStarted(B)),
    EnginePhase.OUTDATED: fleet(*JOINED),
    EnginePhase.SYNCING: fleet(*JOINED, SyncStarted(1, (A, B))),
    EnginePhase.HEALTHY: fleet(*SYNCED),
    EnginePhase.SUSPECT: fleet(*SYNCED, ProbeMissed(A)),
    EnginePhase.POISONED: fleet(
        *JOINED, SyncStarted(1, (A, B)), EngineSyncFailed(A, "why", own=False)
    ),
    EnginePhase.DEAD: fleet(*SYNCED, ActorDied(A, "killed")),
}
NEWS: list[EngineNews] = [
    EngineJoined(A),
    ProbeAnswered(A),
    ProbeMissed(A),
    RequestAnswered(A),
    RequestFailed(A, "why"),
    RequestRefused(A, "why"),
    EngineSynced(A),
    EngineSyncFailed(A, "why", own=True),
    ActorDied(A, "killed"),
]


def record(state: FleetState, engine: str = A) -> EngineRecord:
    return state.engines[engine]


@pytest.mark.parametrize(
    ("phase", "event"),
    list(product(IN_PHASE, NEWS)),
    ids=lambda each: each.value if isinstance(each, EnginePhase) else type(each).__name__,
)
def test_the_table_holds_for_every_event_in_every_phase(
    phase: EnginePhase, event: EngineNews
) -> None:
    before = IN_PHASE[phase]
    assert record(before).phase is phase
    kind = fleet_event_kind(event)
    result = apply_to_fleet(before, event)
    if kind not in FLEET_TRANSITIONS[phase]:
        refused = result.failure()
        assert isinstance(refused, FleetEventRefused)
        assert describe_fleet_error(refused) == f"{A} is {phase}, and cannot {kind}"
        return
    after = result.unwrap()
    if phase is EnginePhase.SUSPECT and isinstance(event, ProbeAnswered):
        assert record(after).phase is EnginePhase.HEALTHY
    elif phase is EnginePhase.SUSPECT and isinstance(event, ProbeMissed):
        assert record(after).phase is EnginePhase.DEAD
    else:
        assert record(after).phase is FLEET_TRANSITIONS[phase][kind]
    if phase is EnginePhase.DEAD:
        assert after is before


def test_a_suspect_that_answers_is_what_its_weights_make_it() -> None:
    suspect = IN_PHASE[EnginePhase.SUSPECT]
    alone = (SyncStarted(2, (B,)), EngineSynced(B), SyncClosed())
    for event in (*alone, ProbeAnswered(A)):
        suspect = apply_to_fleet(suspect, event).unwrap()
    assert record(suspect) == EngineRecord(phase=EnginePhase.OUTDATED, version=1)
    poisoned = IN_PHASE[EnginePhase.POISONED]
    for back in (ProbeMissed(A), ProbeAnswered(A)):
        poisoned = apply_to_fleet(poisoned, back).unwrap()
    assert record(poisoned).phase is EnginePhase.POISONED
    assert record(poisoned).cause == "why"


def test_misses_count_only_in_a_row() -> None:
    settings = replace(SETTINGS, suspect_after=2, dead_after=3)
    state = fleet(*SYNCED, ProbeMissed(A), ProbeAnswered(A), ProbeMissed(A), settings=settings)
    assert record(state).phase is EnginePhase.HEALTHY
    state = apply_to_fleet(state, ProbeMissed(A)).unwrap()
    assert record(state).phase is EnginePhase.SUSPECT
    assert record(state).cause == "it did not answer 2 probes"
    state = apply_to_fleet(state, ProbeMissed(A)).unwrap()
    assert record(state).phase is EnginePhase.DEAD
    assert record(state).cause == "it did not answer 3 probes"


def test_a_hung_engine_in_a_sync_is_given_up_by_its_probes() -> None:
    state = fleet(*JOINED, SyncStarted(1, (A, B)), ProbeMissed(A))
    assert record(state).phase is EnginePhase.SYNCING
    state = apply_to_fleet(state, ProbeMissed(A)).unwrap()
    assert record(state).phase is EnginePhase.DEAD
    assert state.sync is not None
    assert state.sync.blamed == (A,)


def test_requests_that_fail_in_a_row_end_an_engine_and_a_completed_one_starts_over() -> None:
    settings = replace(SETTINGS, max_request_failures=2)
    failed = RequestFailed(A, "out of memory")
    state = fleet(*SYNCED, failed, RequestAnswered(A), failed, settings=settings)
    assert record(state).phase is EnginePhase.HEALTHY
    state = apply_to_fleet(state, failed).unwrap()
    assert record(state).phase is EnginePhase.DEAD
    assert record(state).cause == "2 requests in a row failed: out of memory"


def test_syncs_that_fail_because_of_an_engine_end_it_and_others_failures_do_not() -> None:
    own, echo = EngineSyncFailed(A, "no memory", own=True), EngineSyncFailed(A, "B", own=False)
    begin, done = SyncStarted(1, (A, B)), EngineSynced(B)
    state = fleet(*JOINED, begin, echo, done, begin, echo, done, begin, own, done)
    assert record(state).phase is EnginePhase.POISONED
    state = fleet(*JOINED, begin, own, done, begin, own)
    assert record(state).phase is EnginePhase.DEAD


def test_a_sync_leaves_those_out_of_it_outdated() -> None:
    state = fleet(*SYNCED, SyncStarted(2, (B,)))
    assert record(state) == EngineRecord(phase=EnginePhase.OUTDATED, version=1)
    same = fleet(*SYNCED, SyncStarted(1, (B,)))
    assert record(same).phase is EnginePhase.HEALTHY


def test_a_refusal_makes_a_healthy_engine_wait_for_a_sync() -> None:
    state = fleet(*SYNCED, RequestRefused(A, "it is poisoned"))
    assert record(state) == EngineRecord(phase=EnginePhase.OUTDATED, version=None)


@pytest.mark.parametrize(
    ("events", "refused"),
    [
        ((), SyncStarted(1, (A,))),
        ((), SyncStarted(1, ())),
        (JOINED, SyncStarted(1, ("engine-7",))),
        ((*SYNCED, ProbeMissed(A)), SyncStarted(1, (A,))),
        (SYNCED, SyncStarted(0, (A,))),
        ((*JOINED, SyncStarted(1, (A,)), EngineSynced(A)), SyncStarted(2, (B,))),
        (JOINED, SyncClosed()),
        ((*JOINED, SyncStarted(1, (A,))), SyncClosed()),
    ],
)
def test_a_sync_that_cannot_be_is_refused(
    events: tuple[FleetEvent, ...], refused: FleetEvent
) -> None:
    result = apply_to_fleet(fleet(*events), refused)
    error = result.failure()
    assert isinstance(error, SyncRefused)
    assert error.why in describe_fleet_error(error)


def test_news_of_strangers_and_namesakes_are_refused() -> None:
    unknown = apply_to_fleet(fleet(), ProbeAnswered(A)).failure()
    assert unknown == EngineUnknown(engine=A)
    twice = apply_to_fleet(fleet(EngineStarted(A)), EngineStarted(A)).failure()
    assert twice == EngineStartedTwice(engine=A)
    assert all(A in describe_fleet_error(each) for each in (unknown, twice))


def test_below_the_minimum_the_fleet_is_lost_for_good() -> None:
    settings = replace(SETTINGS, min_healthy=2)
    state = fleet(*SYNCED, ActorDied(A, "killed"), settings=settings)
    assert state.lost is not None
    assert (state.lost.able, state.lost.min_healthy) == (1, 2)
    assert state.lost.causes == (f"{A}: killed",)
    lost = state.lost
    for event in (EngineStarted("engine-2"), EngineJoined("engine-2"), ActorDied(B, "in the end")):
        state = apply_to_fleet(state, event).unwrap()
        assert state.lost is lost, "what made the run stop is what it says"


def test_before_the_first_sync_the_fleet_is_waited_for() -> None:
    settings = replace(SETTINGS, min_healthy=2)
    gathering = fleet(EngineStarted(A), EngineStarted(B), EngineJoined(A), settings=settings)
    assert gathering.lost is None
    died = apply_to_fleet(gathering, ActorDied(B, "no memory")).unwrap()
    assert died.lost is not None


def test_without_a_minimum_an_empty_fleet_waits_while_there_are_replacements() -> None:
    settings = replace(SETTINGS, min_healthy=0, max_replacements=1)
    state = fleet(*SYNCED, ActorDied(A, "killed"), ActorDied(B, "killed"), settings=settings)
    assert state.lost is None
    state = apply_to_fleet(state, EngineStarted("engine-2")).unwrap()
    assert state.lost is None
    state = apply_to_fleet(state, ActorDied("engine-2", "killed")).unwrap()
    assert state.lost is not None
    assert is_successful(apply_to_fleet(state, ProbeAnswered(A)))
