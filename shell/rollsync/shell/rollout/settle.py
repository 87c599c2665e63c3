"""Waiting for something that must not be left half done.

Rule kept here: a cancelled waiter waits on until the thing has ended, and is cancelled then. So a
thread never writes behind the back of the code that cleans up after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def settled(work: Coroutine[object, None, T]) -> T:
    """The result of `work`, which runs to its end also when the caller is cancelled.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile; `work` has ended, and what it
            raised, if anything, is the cause.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()
