"""Writes down what saving and restoring did, event by event.

Rule kept here: the trace is a value; the recorder holds its events and the clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rollsync.pure.rollout.checkpointing import (
    RolloutTrace,
    RolloutTraceEvent,
    RolloutTraceKind,
)

_KEPT_EVENTS = 10_000


class RolloutTraceRecorder:
    """The run's trace, for people and for tests.

    Args:
        clock: seconds, from any origin that does not move.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._events: deque[RolloutTraceEvent] = deque(maxlen=_KEPT_EVENTS)

    @property
    def trace(self) -> RolloutTrace:
        """What was recorded so far: the newest events, if there were very many."""
        return RolloutTrace(events=tuple(self._events))

    def begin(self, kind: RolloutTraceKind, subject: str) -> None:
        """Record the start of an attempt: its later events count seconds from here."""
        self._began_s = self._clock()
        self.record(kind, subject)

    def record(self, kind: RolloutTraceKind, subject: str, detail: str = "") -> None:
        """Record one event."""
        self._events.append(
            RolloutTraceEvent(
                kind=kind, subject=subject, detail=detail, elapsed_s=self._clock() - self._began_s
            )
        )
