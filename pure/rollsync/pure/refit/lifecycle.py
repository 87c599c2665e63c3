"""The life of a generation engine as refit sees it: which weights it may generate with.

    phase        connect    begin_update  finish_update  update_failed  disconnect   close
    unconnected  connected  -             -              unconnected    unconnected  closed
    connected    connected  updating      -              poisoned       unconnected  closed
    updating     -          -             serving        poisoned       poisoned     closed
    serving      serving    updating      -              poisoned       serving      closed
    poisoned     poisoned   updating      -              poisoned       poisoned     closed
    closed       -          -             -              closed         closed       closed

Rules kept here:

- only `serving` generates, and only its own version: half-updated weights are never seen;
- from `poisoned` only a complete update leads back to `serving`, and until one was tried again the
  first cause is the one to know;
- an update may fail before its first weight came: what the engine holds is whole then, but not
  what the policy meant it to hold, so it is `poisoned` all the same;
- losing the connection between two updates loses no weights (`release_after_refit` does that after
  every sync), so `serving` and `poisoned` remember whether they are connected, and an update
  begins only on a connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, assert_never

from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.pure.refit.errors import (
    AnotherVersion,
    EventRefused,
    LifecycleError,
    NotConnected,
    ServesAnotherVersion,
    ServesNothing,
    ServingError,
)


class Phase(StrEnum):
    """Where an engine is in its life."""

    UNCONNECTED = "unconnected"
    CONNECTED = "connected"
    UPDATING = "updating"
    SERVING = "serving"
    POISONED = "poisoned"
    CLOSED = "closed"


class EventKind(StrEnum):
    """What can happen to an engine."""

    CONNECT = "connect"
    BEGIN_UPDATE = "begin_update"
    FINISH_UPDATE = "finish_update"
    UPDATE_FAILED = "update_failed"
    DISCONNECT = "disconnect"
    CLOSE = "close"


TRANSITIONS: Final[Mapping[Phase, Mapping[EventKind, Phase]]] = MappingProxyType(
    {
        Phase.UNCONNECTED: {
            EventKind.CONNECT: Phase.CONNECTED,
            EventKind.UPDATE_FAILED: Phase.UNCONNECTED,
            EventKind.DISCONNECT: Phase.UNCONNECTED,
            EventKind.CLOSE: Phase.CLOSED,
        },
        Phase.CONNECTED: {
            EventKind.CONNECT: Phase.CONNECTED,
            EventKind.BEGIN_UPDATE: Phase.UPDATING,
            EventKind.UPDATE_FAILED: Phase.POISONED,
            EventKind.DISCONNECT: Phase.UNCONNECTED,
            EventKind.CLOSE: Phase.CLOSED,
        },
        Phase.UPDATING: {
            EventKind.FINISH_UPDATE: Phase.SERVING,
            EventKind.UPDATE_FAILED: Phase.POISONED,
            EventKind.DISCONNECT: Phase.POISONED,
            EventKind.CLOSE: Phase.CLOSED,
        },
        Phase.SERVING: {
            EventKind.CONNECT: Phase.SERVING,
            EventKind.BEGIN_UPDATE: Phase.UPDATING,
            EventKind.UPDATE_FAILED: Phase.POISONED,
            EventKind.DISCONNECT: Phase.SERVING,
            EventKind.CLOSE: Phase.CLOSED,
        },
        Phase.POISONED: {
            EventKind.CONNECT: Phase.POISONED,
            EventKind.BEGIN_UPDATE: Phase.UPDATING,
            EventKind.UPDATE_FAILED: Phase.POISONED,
            EventKind.DISCONNECT: Phase.POISONED,
            EventKind.CLOSE: Phase.CLOSED,
        },
        Phase.CLOSED: {
            EventKind.UPDATE_FAILED: Phase.CLOSED,
            EventKind.DISCONNECT: Phase.CLOSED,
            EventKind.CLOSE: Phase.CLOSED,
        },
    }
)
"""Every legal transition; what is not here is refused."""


class Unconnected(Struct, frozen=True, tag=True):
    """No transport, and no weights of the policy's yet."""


class Connected(Struct, frozen=True, tag=True):
    """A transport, and no weights of the policy's yet."""


class Updating(Struct, frozen=True, tag=True):
    """In the middle of an update to `version`; of one that has not named it yet, that is
    `next_version` of before."""

    version: int


class Serving(Struct, frozen=True, tag=True):
    """Holds the complete weights of `version`."""

    version: int
    connected: bool = True


class Poisoned(Struct, frozen=True, tag=True):
    """An update to `version` did not end; `cause` says why, and the weights are unusable. Of an
    update that failed before it named its version, `version` is `next_version` of before."""

    version: int
    cause: str
    connected: bool = True


class Closed(Struct, frozen=True, tag=True):
    """Shut down for good."""


EngineState = Unconnected | Connected | Updating | Serving | Poisoned | Closed


class Connect(Struct, frozen=True, tag=True):
    """The transport is ready to receive."""


class BeginUpdate(Struct, frozen=True, tag=True):
    """The first weight of `version` is about to be loaded."""

    version: int


class FinishUpdate(Struct, frozen=True, tag=True):
    """Every weight of `version` is loaded."""

    version: int


class UpdateFailed(Struct, frozen=True, tag=True):
    """An update that was waited for, or under way, failed, on either side."""

    cause: str


class Disconnect(Struct, frozen=True, tag=True):
    """The transport is given back, or lost."""


class Close(Struct, frozen=True, tag=True):
    """The engine is shut down."""


EngineEvent = Connect | BeginUpdate | FinishUpdate | UpdateFailed | Disconnect | Close


def phase_of(state: EngineState) -> Phase:
    """The row of the table that a state is in."""
    match state:
        case Unconnected():
            return Phase.UNCONNECTED
        case Connected():
            return Phase.CONNECTED
        case Updating():
            return Phase.UPDATING
        case Serving():
            return Phase.SERVING
        case Poisoned():
            return Phase.POISONED
        case Closed():
            return Phase.CLOSED
        case _:
            assert_never(state)


def kind_of(event: EngineEvent) -> EventKind:
    """The column of the table that an event is in."""
    match event:
        case Connect():
            return EventKind.CONNECT
        case BeginUpdate():
            return EventKind.BEGIN_UPDATE
        case FinishUpdate():
            return EventKind.FINISH_UPDATE
        case UpdateFailed():
            return EventKind.UPDATE_FAILED
        case Disconnect():
            return EventKind.DISCONNECT
        case Close():
            return EventKind.CLOSE
        case _:
            assert_never(event)


def apply(state: EngineState, event: EngineEvent) -> Result[EngineState, LifecycleError]:
    """The state after an event, or why the event cannot be."""
    phase, kind = phase_of(state), kind_of(event)
    if kind not in TRANSITIONS[phase]:
        return Failure(EventRefused(phase=phase, event=kind))
    match event:
        case Connect() | Disconnect():
            return Success(_with_connection(state, connected=isinstance(event, Connect)))
        case BeginUpdate():
            if isinstance(state, Serving | Poisoned) and not state.connected:
                return Failure(NotConnected(phase=phase))
            return Success(Updating(event.version))
        case FinishUpdate():
            if isinstance(state, Updating) and state.version != event.version:
                return Failure(AnotherVersion(updating=state.version, finished=event.version))
            return Success(Serving(event.version))
        case UpdateFailed():
            return Success(_after_failure(state, event.cause))
        case Close():
            return Success(Closed())
        case _:
            assert_never(event)


def next_version(state: EngineState) -> int:
    """The version of an update that names none: then updates are counted."""
    if isinstance(state, Updating | Serving | Poisoned):
        return state.version + 1
    return 0


def check_serves(state: EngineState, wanted_version: int | None = None) -> ServingError | None:
    """Why an engine may not generate now, or None when it may.

    Args:
        state: The engine's state.
        wanted_version: The weight version that its answers have to come from; None for whichever
            it has.
    """
    if not isinstance(state, Serving):
        cause = state.cause if isinstance(state, Poisoned) else ""
        return ServesNothing(phase=phase_of(state), cause=cause)
    if wanted_version is not None and state.version != wanted_version:
        return ServesAnotherVersion(serving=state.version, wanted=wanted_version)
    return None


def _after_failure(state: EngineState, cause: str) -> EngineState:
    match state:
        case Updating():
            return Poisoned(state.version, cause)
        case Connected():
            return Poisoned(next_version(state), cause)
        case Serving():
            return Poisoned(next_version(state), cause, connected=state.connected)
        case Poisoned() | Unconnected() | Closed():
            # Of a poisoned engine the first cause is the one to know.
            return state
        case _:
            assert_never(state)


def _with_connection(state: EngineState, *, connected: bool) -> EngineState:
    match state:
        case Unconnected() | Connected():
            return Connected() if connected else Unconnected()
        case Updating():
            return Poisoned(state.version, "the connection was lost in the middle", connected=False)
        case Serving():
            return Serving(state.version, connected=connected)
        case Poisoned():
            return Poisoned(state.version, state.cause, connected=connected)
        case Closed():
            return state
        case _:
            assert_never(state)
