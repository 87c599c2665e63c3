"""How a worker that waits to be connected to learns that the other one has died.

Nothing of a sender reaches a receiver before it connects, so its death then looks like slowness.
Therefore every worker keeps a socket open on which it listens and never accepts, and whoever waits
for it holds a connection to that: when the worker's process ends, the kernel ends the connection.

Rules kept here: only an established connection that ends means that somebody is gone, while one
that never came about (a firewall, a full queue) means nothing; and one is held from the set-up to
`finalize`, not one per stream, because nobody takes them out of the listener's queue.
"""

from __future__ import annotations

import asyncio
import errno

from rollsync.shell.refit.engines.addresses import Listener, socket_towards

_UNDER_WAY = (0, errno.EINPROGRESS)


class Lifeline:
    """This worker's own: others can hold it for as long as the worker lives.

    Args:
        listener: a new one; this object closes it.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.address = listener.address

    def close(self) -> None:
        """Let go; to those who hold it this worker is gone."""
        self._listener.close()


class HeldLifeline:
    """Another worker's, held by this one.

    Args:
        address: of the other worker's `Lifeline`.
    """

    def __init__(self, address: str) -> None:
        self._connection, target = socket_towards(address)
        self._connection.setblocking(False)
        self._held = self._connection.connect_ex(target) in _UNDER_WAY

    async def ended(self) -> None:
        """Return when the other worker is gone; wait for ever if that cannot be known."""
        loop = asyncio.get_running_loop()
        if self._held:
            try:
                # Nobody sends anything: this returns when the connection ends.
                await loop.sock_recv(self._connection, 1)
                return
            except ConnectionResetError:
                return
            except OSError:
                self._held = False
        await loop.create_future()

    def close(self) -> None:
        """Let go."""
        self._connection.close()
