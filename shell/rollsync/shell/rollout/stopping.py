"""How work that may take minutes ends when the run is asked to stop.

Rule kept here: what was begun has ended when the wait for it does, also when that was cancelled.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def asked_by(*signals: signal.Signals) -> tuple[asyncio.Event, asyncio.Event]:
    """What this process is asked for by signals from now on, in the running event loop: set by the
    first of them, and by the second."""
    first, second = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (second if first.is_set() else first).set()

    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, asked)
    return first, second


async def done_before(stop: asyncio.Event, work: Coroutine[object, None, None]) -> bool:
    """Wait for `work`; whether it is done. False: `stop` was set, and the work is cancelled.

    Raises:
        Exception: whatever `work` raised.
    """
    working = await _ended(stop, work)
    if working.cancelled():
        return False
    working.result()
    return True


async def result_before(stop: asyncio.Event, work: Coroutine[object, None, T]) -> T | None:
    """The result of `work`. None: `stop` was set, and the work is cancelled.

    Raises:
        Exception: whatever `work` raised.
    """
    working = await _ended(stop, work)
    return None if working.cancelled() else working.result()


async def _ended(stop: asyncio.Event, work: Coroutine[object, None, T]) -> asyncio.Task[T]:
    """Wait for `work`, which is cancelled when `stop` is set."""
    working = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
    return working
