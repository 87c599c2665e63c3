"""A fleet of generation engines as one value: what the driver knows of each, and its settings.

Rule kept here: the value holds no clock readings and no handles; it changes only by
`rollsync.pure.refit.fleet.transitions.apply_to_fleet`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct
from rpds import HashTrieMap

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class FleetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an engine counts as lost, and with how few the run goes on."""

    min_healthy: _Natural = 1
    """With fewer engines the run saves and stops. Dead ones do not count, nor replacements before
    they have weights. 0: a run without engines waits for a replacement, while there are any."""
    max_replacements: _Natural = 8
    """Engines that one process starts in place of dead ones."""
    probe_interval_s: _Seconds = 5.0
    probe_timeout_s: _Seconds = 10.0
    suspect_after: _Count = 2
    """Missed probes in a row after which an engine gets no work until it answers again."""
    dead_after: _Count = 6
    """Missed probes in a row after which an engine is given up."""
    max_request_failures: _Count = 3
    """Failed requests in a row after which an engine is given up."""
    max_sync_failures: _Count = 2
    """Syncs in a row that failed because of it, after which an engine is given up."""
    join_timeout_s: _Seconds = 600.0
    """How long an engine may take to start."""
    request_timeout_s: _Seconds = 600.0
    """How long an engine may take for one completion."""


class EnginePhase(StrEnum):
    """What an engine of the fleet is good for."""

    JOINING = "joining"
    OUTDATED = "outdated"
    SYNCING = "syncing"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    POISONED = "poisoned"
    DEAD = "dead"


ABLE: Final = frozenset(
    {
        EnginePhase.OUTDATED,
        EnginePhase.SYNCING,
        EnginePhase.HEALTHY,
        EnginePhase.SUSPECT,
        EnginePhase.POISONED,
    }
)
"""Phases of engines that serve or will, after a sync or an answer."""


class EngineRecord(Struct, frozen=True, kw_only=True):
    """One engine, from the driver's point of view."""

    phase: EnginePhase = EnginePhase.JOINING
    version: int | None = None
    """Of the whole weights it holds; None when it has none, or a mixture."""
    poisoned: bool = False
    """Whether its weights are a mixture."""
    cause: str = ""
    """Why it is poisoned, suspect or dead."""
    missed_probes: int = 0
    failed_requests: int = 0
    failed_syncs: int = 0


class SyncAttempt(Struct, frozen=True, kw_only=True):
    """A sync under way, or ended and not yet closed."""

    version: int
    engines: tuple[str, ...]
    """Who takes part in this attempt."""
    attempt: int = 1
    blamed: tuple[str, ...] = ()
    """Engines because of which this attempt or an earlier one failed."""


class FleetLost(Struct, frozen=True, kw_only=True):
    """Too few engines are left: the run has to save and stop."""

    able: int
    min_healthy: int
    causes: tuple[str, ...]
    """How each dead engine ended, by name."""


class FleetState(Struct, frozen=True, kw_only=True):
    """All engines that a run's process has started."""

    settings: FleetSettings
    wanted: int
    """Engines that the run is configured for."""
    engines: HashTrieMap[str, EngineRecord] = HashTrieMap()
    started: tuple[str, ...] = ()
    """Their names, in the order of their start."""
    target_version: int | None = None
    """Of the newest sync that began."""
    sync: SyncAttempt | None = None
    lost: FleetLost | None = None


def new_fleet(settings: FleetSettings, *, wanted: int) -> FleetState:
    """A fleet of which no engine is started yet."""
    return FleetState(settings=settings, wanted=wanted)


def count_able(state: FleetState) -> int:
    """Engines that serve, or will after a sync or an answer."""
    return sum(record.phase in ABLE for record in state.engines.values())


def count_joining(state: FleetState) -> int:
    """Engines that are starting."""
    return sum(record.phase is EnginePhase.JOINING for record in state.engines.values())


def replacements_left(state: FleetState) -> int:
    """How many more engines this process may start in place of dead ones."""
    return state.settings.max_replacements - max(0, len(state.engines) - state.wanted)
