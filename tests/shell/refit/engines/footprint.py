"""What a process holds beside ordinary memory, to find out what a stream has left behind.

Rule kept here: Python's collector does not run in between, as a trainer may have switched it off:
what was reserved is given back by whoever reserved it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

PATIENCE_S = 20.0
"""For what ends on its own: a connection whose other end is told of a failure."""


@dataclass(frozen=True)
class Footprint:
    """What this process holds now."""

    open_files: int
    threads: int
    shared_buffers: int
    """Mappings of the transfer buffers of the shm engine."""

    @classmethod
    def now(cls) -> Footprint:
        with open("/proc/self/maps", encoding="utf-8") as file:
            shared = sum("memfd:rollsync" in line for line in file)
        return cls(
            open_files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            shared_buffers=shared,
        )

    def at_last(self) -> Footprint:
        """What this process holds when that is what it was, or else in the end."""
        end = time.monotonic() + PATIENCE_S
        while (found := Footprint.now()) != self and time.monotonic() < end:
            time.sleep(0.01)
        return found


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Nothing is collected in here."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
