"""Every order of events of a small fleet, to a depth, against a witness that is told only facts.

The witness knows nothing of phases: it notes for each engine whether its process lives, which whole
weights it holds in truth, and whether it has ever been through a whole sync.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

import pytest
from msgspec import Struct
from msgspec.structs import replace
from returns.pipeline import is_successful

from rollsync.pure.refit.fleet.decisions import (
    RetrySync,
    SyncUnfinished,
    after_sync,
    awaits_sync,
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
    RequestAnswered,
    RequestFailed,
    RequestRefused,
    SyncClosed,
    SyncStarted,
)
from rollsync.pure.refit.fleet.state import (
    EnginePhase,
    FleetSettings,
    FleetState,
    count_able,
    new_fleet,
)
from rollsync.pure.refit.fleet.transitions import apply_to_fleet
from tests.processes import in_processes

ENGINES = 3
VERSIONS = 2


class Fact(Struct, frozen=True):
    """The truth about one engine."""

    alive: bool = True
    weights: int | None = None
    silent: int = 0


class Moment(Struct, frozen=True):
    """The ledger, and the truth beside it."""

    fleet: FleetState
    facts: tuple[tuple[str, Fact], ...]
    was_below: bool = False


def next_events(fleet: FleetState) -> Iterator[FleetEvent]:
    """All that the world, and the driver as the decisions tell it, may do next."""
    if len(fleet.engines) < fleet.wanted or replacements_wanted(fleet):
        yield EngineStarted(f"engine-{len(fleet.engines)}")
    for name, record in sorted(fleet.engines.items()):
        if record.phase is EnginePhase.DEAD:
            continue
        yield ActorDied(name, "killed")
        yield ProbeMissed(name)
        if record.phase is EnginePhase.JOINING:
            yield EngineJoined(name)
            continue
        yield ProbeAnswered(name)
        if record.phase is EnginePhase.HEALTHY:
            yield RequestAnswered(name)
            yield RequestFailed(name, "why")
            yield RequestRefused(name, "why")
        if record.phase is EnginePhase.SYNCING:
            yield EngineSynced(name)
            yield EngineSyncFailed(name, "why", own=True)
            yield EngineSyncFailed(name, "why", own=False)
    if fleet.sync is None and may_sync(fleet):
        newest = -1 if fleet.target_version is None else fleet.target_version
        for version in range(max(0, newest), min(newest + 2, VERSIONS)):
            yield SyncStarted(version, takes_part(fleet))
    elif fleet.sync is not None:
        decided = after_sync(fleet)
        if isinstance(decided, RetrySync):
            yield SyncStarted(decided.version, decided.engines)
        elif not isinstance(decided, SyncUnfinished):
            yield SyncClosed()


def witnessed(moment: Moment, event: FleetEvent) -> tuple[tuple[str, Fact], ...]:
    """The truth after an event."""
    facts = dict(moment.facts)
    match event:
        case EngineStarted():
            facts[event.engine] = Fact()
        case SyncStarted():
            for name in event.engines:
                facts[name] = replace(facts[name], weights=None)
        case EngineSynced():
            assert moment.fleet.sync is not None
            facts[event.engine] = Fact(weights=moment.fleet.sync.version)
        case ActorDied():
            facts[event.engine] = Fact(alive=False)
        case RequestRefused():
            facts[event.engine] = replace(facts[event.engine], weights=None)
        case ProbeMissed():
            fact = facts[event.engine]
            facts[event.engine] = replace(fact, silent=fact.silent + 1)
        case ProbeAnswered():
            facts[event.engine] = replace(facts[event.engine], silent=0)
        case _:
            pass
    return tuple(sorted(facts.items()))


def after(moment: Moment, event: FleetEvent) -> Moment:
    result = apply_to_fleet(moment.fleet, event)
    assert is_successful(result), (event, result)
    fleet = result.unwrap()
    gathering = fleet.target_version is None and (
        len(fleet.engines) < fleet.wanted
        or any(each.phase is EnginePhase.JOINING for each in fleet.engines.values())
    )
    below = count_able(fleet) < fleet.settings.min_healthy and not gathering
    return Moment(fleet, witnessed(moment, event), moment.was_below or below)


def check(moment: Moment) -> None:
    fleet, facts = moment.fleet, dict(moment.facts)
    for version in range(VERSIONS):
        for name in may_serve(fleet, version):
            assert facts[name].alive, f"{name} is dead and serves"
            assert facts[name].weights == version, f"{name} serves weights that it has not"
            assert facts[name].silent < fleet.settings.suspect_after, f"{name} is silent and serves"
            assert version == fleet.target_version, f"{name} serves an old version"
    if moment.was_below:
        assert fleet.lost is not None, "below the minimum, and the run goes on"
    if fleet.lost is not None:
        assert not any(may_serve(fleet, version) for version in range(VERSIONS))
        assert takes_part(fleet) == ()
        assert replacements_wanted(fleet) == 0
        assert not isinstance(after_sync(fleet), RetrySync)
    if awaits_sync(fleet):
        assert fleet.sync is None, "a sync is due in the middle of one"
        assert may_sync(fleet), "a sync is due that cannot begin"
    if fleet.sync is not None:
        assert fleet.sync.attempt <= 1 + len(fleet.sync.blamed), "tried again with nobody to blame"
        decided = after_sync(fleet)
        if isinstance(decided, RetrySync):
            assert not set(decided.engines) & set(fleet.sync.blamed)
            assert all(facts[name].alive for name in decided.engines)
    living = sum(each.phase is not EnginePhase.DEAD for each in fleet.engines.values())
    assert living + replacements_wanted(fleet) <= max(fleet.wanted, living)


def shape(moment: Moment) -> Hashable:
    """What two moments have in common that differ only in which engine is which."""
    fleet, facts = moment.fleet, dict(moment.facts)
    sync = fleet.sync
    engines = Counter(
        (
            record,
            facts[name],
            sync is not None and name in sync.engines,
            sync is not None and name in sync.blamed,
        )
        for name, record in fleet.engines.items()
    )
    return (
        frozenset(engines.items()),
        fleet.target_version,
        None if sync is None else (sync.version, sync.attempt),
        fleet.lost is not None,
        moment.was_below,
    )


def explore(settings: FleetSettings, depth: int) -> tuple[int, int]:
    """Moments of distinct shape within `depth` events, and how many of them are lost.

    From two starts: a fleet that waits for its first sync, and one that serves.
    """
    waiting = Moment(new_fleet(settings, wanted=ENGINES), ())
    names = [f"engine-{number}" for number in range(ENGINES)]
    for name in names:
        waiting = after(waiting, EngineStarted(name))
    for name in names:
        waiting = after(waiting, EngineJoined(name))
    serving = after(waiting, SyncStarted(0, tuple(names)))
    for name in names:
        serving = after(serving, EngineSynced(name))
    serving = after(serving, SyncClosed())
    lost = 0
    seen, edge = {shape(waiting), shape(serving)}, [waiting, serving]
    for _ in range(depth):
        reached: list[Moment] = []
        for moment in edge:
            for event in next_events(moment.fleet):
                found = after(moment, event)
                key = shape(found)
                if key not in seen:
                    check(found)
                    seen.add(key)
                    reached.append(found)
                    lost += found.fleet.lost is not None
        edge = reached
    return len(seen), lost


def settings_with(min_healthy: int) -> FleetSettings:
    return FleetSettings(
        min_healthy=min_healthy,
        max_replacements=1,
        suspect_after=1,
        dead_after=2,
        max_request_failures=2,
        max_sync_failures=2,
    )


@pytest.mark.parametrize("min_healthy", [0, 1, 2, 3])
def test_no_order_of_events_breaks_a_promise(min_healthy: int) -> None:
    moments, lost = explore(settings_with(min_healthy), depth=5)
    assert moments > 3_000
    assert lost > 0


@pytest.mark.slow
def test_no_longer_order_of_events_breaks_a_promise() -> None:
    for moments, lost in in_processes(explore_long, [1, 2]):
        assert moments > 80_000
        assert lost > 0


def explore_long(min_healthy: int) -> tuple[int, int]:
    return explore(settings_with(min_healthy), depth=8)
