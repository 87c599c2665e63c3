"""The ledger of a run's generation engines: what becomes of each, event by event.

    phase    join    answer   miss     succeed  fail     refuse   begin   sync    spoil    die
    joining  outdat. joining  joining  -        -        -        -       -       -        dead
    outdated -       outdated suspect  outdated outdated outdated syncing -       -        dead
    syncing  -       syncing  syncing  syncing  syncing  syncing  -       healthy poisoned dead
    healthy  -       healthy  suspect  healthy  healthy  outdated syncing -       -        dead
    suspect  -       (holds)  suspect  suspect  suspect  suspect  -       -       -        dead
    poisoned -       poisoned suspect  poisoned poisoned poisoned syncing -       -        dead
    dead     dead    dead     dead     dead     dead     dead     -       dead    dead     dead

`begin` is a sync's beginning for an engine that takes part; the other columns are one event each.
Rules kept here:

- an engine is `healthy` only while it holds the whole weights of the newest sync that began;
- a suspect that answers again is what its weights make it (`holds`): healthy, outdated, poisoned;
- what is counted in the settings (missed probes, failed requests, failed syncs, each in a row)
  leads from any living phase to `dead`, and nothing leads back: a replacement is another engine;
- late news of a dead engine change nothing;
- a fleet that was once below `min_healthy` stays lost, whatever comes after.

`rollsync.pure.refit.fleet.decisions` says what follows from a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, assert_never

from msgspec.structs import replace
from returns.result import Failure, Result, Success

from rollsync.pure.refit.fleet.errors import (
    EngineStartedTwice,
    EngineUnknown,
    FleetError,
    FleetEventRefused,
    SyncRefused,
)
from rollsync.pure.refit.fleet.events import (
    ActorDied,
    EngineJoined,
    EngineNews,
    EngineStarted,
    EngineSynced,
    EngineSyncFailed,
    FleetEvent,
    FleetEventKind,
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
    FleetLost,
    FleetState,
    SyncAttempt,
    count_able,
    count_joining,
    replacements_left,
)

_P, _K = EnginePhase, FleetEventKind
_REQUESTS = (_K.SUCCEED, _K.FAIL)


def _row(phase: EnginePhase, **others: EnginePhase) -> Mapping[FleetEventKind, EnginePhase]:
    """A living engine's row: it stays in its phase, but for `others`."""
    stays = dict.fromkeys((_K.ANSWER, _K.MISS, _K.REFUSE, *_REQUESTS), phase)
    changed = {FleetEventKind(name): to for name, to in others.items()}
    return MappingProxyType({**stays, _K.DIE: _P.DEAD, **changed})


FLEET_TRANSITIONS: Final[Mapping[EnginePhase, Mapping[FleetEventKind, EnginePhase]]] = (
    MappingProxyType(
        {
            _P.JOINING: MappingProxyType(
                {
                    _K.JOIN: _P.OUTDATED,
                    _K.ANSWER: _P.JOINING,
                    _K.MISS: _P.JOINING,
                    _K.DIE: _P.DEAD,
                }
            ),
            _P.OUTDATED: _row(_P.OUTDATED, miss=_P.SUSPECT, begin=_P.SYNCING),
            _P.SYNCING: _row(_P.SYNCING, sync=_P.HEALTHY, spoil=_P.POISONED),
            _P.HEALTHY: _row(_P.HEALTHY, miss=_P.SUSPECT, refuse=_P.OUTDATED, begin=_P.SYNCING),
            _P.SUSPECT: _row(_P.SUSPECT),
            _P.POISONED: _row(_P.POISONED, miss=_P.SUSPECT, begin=_P.SYNCING),
            _P.DEAD: MappingProxyType({kind: _P.DEAD for kind in _K if kind is not _K.BEGIN}),
        }
    )
)
"""Every legal transition; what is not here is refused. Three depend on more than the phase: a miss
makes suspect only from `suspect_after` on, an answer makes of a suspect what its weights say, and
too many of a kind in a row make dead."""


def apply_to_fleet(state: FleetState, event: FleetEvent) -> Result[FleetState, FleetError]:
    """The fleet after an event, or why the event cannot be. An event that changes nothing answers
    the same value."""
    match event:
        case EngineStarted():
            if event.engine in state.engines:
                return Failure(EngineStartedTwice(engine=event.engine))
            state = replace(state, started=(*state.started, event.engine))
            return Success(_with(state, event.engine, EngineRecord()))
        case SyncStarted():
            return _begin_sync(state, event)
        case SyncClosed():
            if state.sync is None or _syncing(state, state.sync):
                return Failure(SyncRefused(why="there is no sync, or it has not ended everywhere"))
            return Success(replace(state, sync=None))
        case _:
            return _apply_news(state, event)


def _apply_news(state: FleetState, event: EngineNews) -> Result[FleetState, FleetError]:
    record = state.engines.get(event.engine)
    if record is None:
        return Failure(EngineUnknown(engine=event.engine))
    kind = fleet_event_kind(event)
    if kind not in FLEET_TRANSITIONS[record.phase]:
        return Failure(FleetEventRefused(engine=event.engine, phase=record.phase, event=kind))
    if record.phase is EnginePhase.DEAD:
        return Success(state)
    after = _changed(state, record, event)
    if after == record:
        return Success(state)
    own = isinstance(event, EngineSyncFailed) and event.own
    if own or after.phase is EnginePhase.DEAD:
        state = _blame(state, event.engine)
    return Success(_with(state, event.engine, after))


def _changed(state: FleetState, record: EngineRecord, event: EngineNews) -> EngineRecord:
    settings = state.settings
    to = FLEET_TRANSITIONS[record.phase][fleet_event_kind(event)]
    match event:
        case EngineJoined():
            return replace(record, phase=to)
        case ProbeAnswered():
            if record.phase is EnginePhase.SUSPECT:
                record = replace(record, cause="" if not record.poisoned else record.cause)
                to = _phase_by_weights(record, state.target_version)
            return replace(record, phase=to, missed_probes=0)
        case ProbeMissed():
            missed = record.missed_probes + 1
            if record.phase is EnginePhase.JOINING:  # Its deadline is another one.
                return record
            if missed >= settings.dead_after:
                return _dead(record, f"it did not answer {missed} probes")
            if missed < settings.suspect_after or to is record.phase:
                return replace(record, missed_probes=missed)
            why = record.cause or f"it did not answer {missed} probes"
            return replace(record, phase=to, missed_probes=missed, cause=why)
        case RequestAnswered():
            return replace(record, failed_requests=0)
        case RequestFailed():
            failed = record.failed_requests + 1
            if failed >= settings.max_request_failures:
                return _dead(record, f"{failed} requests in a row failed: {event.cause}")
            return replace(record, failed_requests=failed)
        case RequestRefused():
            # What it holds is not known any more: only a sync can tell.
            return replace(record, phase=to, version=None)
        case EngineSynced():
            # Only one that takes part in the sync under way is here, and that is the newest one.
            # Nothing is held against an engine that has just loaded a whole model.
            return EngineRecord(phase=to, version=state.target_version)
        case EngineSyncFailed():
            failed = record.failed_syncs + (1 if event.own else 0)
            if failed >= settings.max_sync_failures:
                return _dead(record, f"{failed} syncs in a row failed: {event.cause}")
            return replace(record, phase=to, poisoned=True, cause=event.cause, failed_syncs=failed)
        case ActorDied():
            return _dead(record, event.cause)
        case _:
            assert_never(event)


def _begin_sync(state: FleetState, event: SyncStarted) -> Result[FleetState, FleetError]:
    why = _why_no_sync(state, event)
    if why is not None:
        return Failure(SyncRefused(why=why))
    engines = state.engines
    for name, record in state.engines.items():
        if name in event.engines:
            to = FLEET_TRANSITIONS[record.phase][FleetEventKind.BEGIN]
            engines = engines.insert(name, replace(record, phase=to, version=None))
        elif record.phase is EnginePhase.HEALTHY and record.version != event.version:
            engines = engines.insert(name, replace(record, phase=EnginePhase.OUTDATED))
    before = state.sync
    sync = SyncAttempt(
        version=event.version,
        engines=event.engines,
        attempt=1 if before is None else before.attempt + 1,
        blamed=() if before is None else before.blamed,
    )
    return Success(replace(state, engines=engines, target_version=event.version, sync=sync))


def _why_no_sync(state: FleetState, event: SyncStarted) -> str | None:
    if not event.engines:
        return "no engine takes part"
    for name in event.engines:
        record = state.engines.get(name)
        if record is None:
            return f"there is no engine {name}"
        if FleetEventKind.BEGIN not in FLEET_TRANSITIONS[record.phase]:
            return f"{name} is {record.phase}"
    if state.target_version is not None and event.version < state.target_version:
        return f"version {event.version} is older than {state.target_version}"
    if state.sync is not None and state.sync.version != event.version:
        return f"the sync to version {state.sync.version} is not closed"
    return None


def _with(state: FleetState, engine: str, record: EngineRecord) -> FleetState:
    """The fleet with an engine's record, and with what its loss means."""
    after = replace(state, engines=state.engines.insert(engine, record))
    if after.lost is not None or not _is_lost(after):
        return after
    dead = sorted(
        f"{name}: {each.cause}"
        for name, each in after.engines.items()
        if each.phase is EnginePhase.DEAD
    )
    lost = FleetLost(
        able=count_able(after), min_healthy=after.settings.min_healthy, causes=tuple(dead)
    )
    return replace(after, lost=lost)


def _is_lost(state: FleetState) -> bool:
    able, joining = count_able(state), count_joining(state)
    if able == 0 and joining == 0 and replacements_left(state) == 0:
        return True
    # Before the first sync the engines are still coming.
    gathering = state.target_version is None and (joining > 0 or len(state.engines) < state.wanted)
    return able < state.settings.min_healthy and not gathering


def _syncing(state: FleetState, sync: SyncAttempt) -> bool:
    """Whether an engine's outcome is still missing."""
    return any(state.engines[name].phase is EnginePhase.SYNCING for name in sync.engines)


def _phase_by_weights(record: EngineRecord, target_version: int | None) -> EnginePhase:
    if record.poisoned:
        return EnginePhase.POISONED
    if record.version is not None and record.version == target_version:
        return EnginePhase.HEALTHY
    return EnginePhase.OUTDATED


def _dead(record: EngineRecord, cause: str) -> EngineRecord:
    return replace(record, phase=EnginePhase.DEAD, version=None, cause=cause)


def _blame(state: FleetState, engine: str) -> FleetState:
    """Notes that the sync under way lost the engine, if it takes part."""
    sync = state.sync
    if sync is None or engine not in sync.engines or engine in sync.blamed:
        return state
    return replace(state, sync=replace(sync, blamed=(*sync.blamed, engine)))
