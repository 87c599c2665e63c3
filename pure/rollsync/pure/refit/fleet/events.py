"""What can happen to a fleet of generation engines, and to one engine of it."""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from msgspec import Struct


class FleetEventKind(StrEnum):
    """What can happen to one engine: the table's columns."""

    JOIN = "join"
    ANSWER = "answer"
    MISS = "miss"
    SUCCEED = "succeed"
    FAIL = "fail"
    REFUSE = "refuse"
    BEGIN = "begin"
    SYNC = "sync"
    SPOIL = "spoil"
    DIE = "die"


class EngineStarted(Struct, frozen=True, tag=True):
    """The start of an engine began; of a replacement too."""

    engine: str


class EngineJoined(Struct, frozen=True, tag=True):
    """It has started, and has no weights of the policy's yet."""

    engine: str


class ProbeAnswered(Struct, frozen=True, tag=True):
    """It answered a probe."""

    engine: str


class ProbeMissed(Struct, frozen=True, tag=True):
    """It did not answer a probe in time."""

    engine: str


class RequestAnswered(Struct, frozen=True, tag=True):
    """It completed a request."""

    engine: str


class RequestFailed(Struct, frozen=True, tag=True):
    """It failed at a request, or took too long."""

    engine: str
    cause: str


class RequestRefused(Struct, frozen=True, tag=True):
    """It refused a request: it does not hold the weights that the ledger thinks it holds."""

    engine: str
    cause: str


class SyncStarted(Struct, frozen=True, tag=True):
    """A sync to `version` began, or is tried again, with these engines."""

    version: int
    engines: tuple[str, ...]


class EngineSynced(Struct, frozen=True, tag=True):
    """It holds the whole weights of the sync under way."""

    engine: str


class EngineSyncFailed(Struct, frozen=True, tag=True):
    """The sync under way failed for it. `own`: because of it, and not of somebody else."""

    engine: str
    cause: str
    own: bool


class ActorDied(Struct, frozen=True, tag=True):
    """Its process is gone, or it was given up."""

    engine: str
    cause: str


class SyncClosed(Struct, frozen=True, tag=True):
    """The sync under way is over, well or not."""


EngineNews = (
    EngineJoined
    | ProbeAnswered
    | ProbeMissed
    | RequestAnswered
    | RequestFailed
    | RequestRefused
    | EngineSynced
    | EngineSyncFailed
    | ActorDied
)
FleetEvent = EngineStarted | EngineNews | SyncStarted | SyncClosed


def fleet_event_kind(event: EngineNews) -> FleetEventKind:
    """The column of the table that an event is in."""
    match event:
        case EngineJoined():
            return FleetEventKind.JOIN
        case ProbeAnswered():
            return FleetEventKind.ANSWER
        case ProbeMissed():
            return FleetEventKind.MISS
        case RequestAnswered():
            return FleetEventKind.SUCCEED
        case RequestFailed():
            return FleetEventKind.FAIL
        case RequestRefused():
            return FleetEventKind.REFUSE
        case EngineSynced():
            return FleetEventKind.SYNC
        case EngineSyncFailed():
            return FleetEventKind.SPOIL
        case ActorDied():
            return FleetEventKind.DIE
        case _:
            assert_never(event)
