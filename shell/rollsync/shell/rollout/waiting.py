"""How the pumps wait: for a change, and for the engines to be free.

Rule kept here: a waiter first notes the version it has seen, then looks, then waits for a later
one; so that no change between looking and waiting is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ChangeSignal:
    """Counts changes and wakes those who wait for the next one."""

    def __init__(self) -> None:
        self.version = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something has changed."""
        self.version += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait_past(self, seen: int) -> None:
        """Return when there was a change after version `seen`; at once if there was."""
        while self.version <= seen:
            await self._next.wait()


class GenerationGate:
    """Lets requests run together, and a weight sync only when none runs.

    A request that runs while weights change would see half of each. A waiting sync holds back new
    requests, so that it comes to its turn.

    Args:
        max_concurrent_requests: requests under way at once.
    """

    def __init__(self, max_concurrent_requests: int) -> None:
        self._places = asyncio.Semaphore(max_concurrent_requests)
        self._running = 0
        self._syncs = 0
        self._changed = ChangeSignal()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Run one request, when there is a place and no sync runs or waits."""
        async with self._places:
            while self._syncs:
                await self._changed.wait_past(self._changed.version)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
                self._changed.notify()

    @asynccontextmanager
    async def sync(self) -> AsyncIterator[None]:
        """Hold back new requests, wait for the running ones, and have the engines alone."""
        self._syncs += 1
        try:
            while self._running:
                await self._changed.wait_past(self._changed.version)
            yield
        finally:
            self._syncs -= 1
            self._changed.notify()
