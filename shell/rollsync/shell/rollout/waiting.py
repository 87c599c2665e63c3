"""How the pumps wait for a change of the state.

Rule kept here: a waiter first notes the version it has seen, then looks, then waits for a later
one; so that no change between looking and waiting is missed.
"""

from __future__ import annotations

import asyncio


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
