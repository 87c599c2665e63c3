"""What can be wrong with an event of a fleet, as values, and in words."""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct


class EngineStartedTwice(Struct, frozen=True, kw_only=True, tag=True):
    """Two engines of one name."""

    engine: str


class EngineUnknown(Struct, frozen=True, kw_only=True, tag=True):
    """News of an engine that was never started."""

    engine: str


class FleetEventRefused(Struct, frozen=True, kw_only=True, tag=True):
    """The table has no transition for this event in this phase."""

    engine: str
    phase: str
    event: str


class SyncRefused(Struct, frozen=True, kw_only=True, tag=True):
    """A sync that cannot begin, or not end."""

    why: str


FleetError = EngineStartedTwice | EngineUnknown | FleetEventRefused | SyncRefused


def describe_fleet_error(error: FleetError) -> str:
    """One sentence for a person."""
    match error:
        case EngineStartedTwice():
            return f"{error.engine} was started twice: give every engine a name of its own"
        case EngineUnknown():
            return f"there is no engine {error.engine}"
        case FleetEventRefused():
            return f"{error.engine} is {error.phase}, and cannot {error.event}"
        case SyncRefused():
            return f"the sync cannot begin or end now: {error.why}"
        case _:
            assert_never(error)
