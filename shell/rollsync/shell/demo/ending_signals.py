"""Signals that end a process, taken so that it can end what it has started first.

Rule kept here: the first of them raises an exception, at once or as soon as it is no longer held
back; whatever comes after it finds the end under way, and cannot cut it short.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], object] | int | None


class EndingSignals:
    """Takes `ENDING_SIGNALS` in a `with`, in the main thread; those that are ignored stay so."""

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Handler] = {}
        self._first: int | None = None
        self._hold_back = False

    def __enter__(self) -> Self:
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                self._handlers[number] = handler
                signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """A signal meanwhile raises at the end.

        Raises:
            KeyboardInterrupt: for a SIGINT.
            SystemExit: for another one, with the code that a shell gives to that end.
        """
        self._hold_back = True
        try:
            yield
        finally:
            self._hold_back = False
        self._end()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = number
            if not self._hold_back:
                self._end()

    def _end(self) -> None:
        if self._first == signal.SIGINT:
            raise KeyboardInterrupt
        if self._first is not None:
            raise SystemExit(128 + self._first)
