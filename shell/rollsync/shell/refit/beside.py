"""Calls that may never return, made in a thread of their own.

Rule kept here: nobody has to wait for such a thread, not even the interpreter at its end.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rollsync.shell.refit.errors import RefitError

_T = TypeVar("_T")


def begun(call: Callable[[], _T]) -> Future[_T]:
    """What `call` will answer; it has begun."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def answered_in(timeout_s: float, answer: Future[_T], *, who: str, setting: str) -> _T:
    """An answer that has been begun.

    Args:
        timeout_s: how long to wait for it.
        answer: it.
        who: who answers, and what, as in `the engines have not ended update_weights`.
        setting: what makes the wait longer.

    Raises:
        RefitError: it did not come in time.
        Exception: whatever the call raised.
    """
    if not concurrent.futures.wait([answer], timeout=timeout_s).done:
        raise RefitError(
            f"{who} within {timeout_s:g} s",
            remedy="see whether a process there is stopped or stuck, and end it; raise"
            f" {setting} if it is only slow",
        )
    return answer.result()
