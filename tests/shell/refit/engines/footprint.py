"""What a process holds beside ordinary memory, to find out what a stream has left behind."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """What this process holds now."""

    open_files: int
    threads: int
    shared_buffers: int
    """Mappings of the transfer buffers of the shm engine."""

    @classmethod
    def now(cls) -> Footprint:
        # An error that was caught keeps the frames that it passed, and what they hold.
        gc.collect()
        with open("/proc/self/maps", encoding="utf-8") as file:
            shared = sum("memfd:rollsync" in line for line in file)
        return cls(
            open_files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            shared_buffers=shared,
        )
