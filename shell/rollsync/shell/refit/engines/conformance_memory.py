"""What the processes of the conformance suite hold, to find out what a stream has left behind.

Rule kept here: what is exact is compared exactly; memory may be more by what an allocator keeps,
which is about one stream's, and not by what is kept from stream to stream.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY_BUCKET_BYTES: Final = 4 << 20
"""Of a bucket in the tests of memory: far above what an allocator keeps for itself."""
SETTLING_S: Final = 20.0
"""For what ends on its own: a connection whose other end is told of a failure."""
_MEMORY_SLACK_BYTES: Final = 4 * MEMORY_BUCKET_BYTES
_MAPPINGS_SLACK: Final = 12
_STATUS: Final = Path("/proc/self/status")
_MAPS: Final = Path("/proc/self/maps")


@dataclass(frozen=True)
class Held:
    """What a process holds, or several do.

    Attributes:
        open_files: files and sockets.
        mappings: ranges of addresses.
        memory_bytes: anonymous and shared memory, as far as it is in use.
    """

    open_files: int
    mappings: int
    memory_bytes: int

    @classmethod
    def now(cls) -> Held:
        """By this process."""
        status = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        used_kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        return cls(
            open_files=len(os.listdir("/proc/self/fd")),
            mappings=len(_MAPS.read_text().splitlines()),
            memory_bytes=used_kib * 1024,
        )

    def __add__(self, other: Held) -> Held:
        return Held(
            self.open_files + other.open_files,
            self.mappings + other.mappings,
            self.memory_bytes + other.memory_bytes,
        )

    def is_about(self, earlier: Held) -> bool:
        """Whether it is no more than it was, but for what comes and goes with anything."""
        return (
            self.open_files <= earlier.open_files
            and self.mappings <= earlier.mappings + _MAPPINGS_SLACK
            and self.memory_bytes <= earlier.memory_bytes + _MEMORY_SLACK_BYTES
        )


def settled(held: Callable[[], Held], earlier: Held) -> Held:
    """What is held when that is what it was, or else in the end."""
    end = time.monotonic() + SETTLING_S
    while not (found := held()).is_about(earlier) and time.monotonic() < end:
        time.sleep(0.05)
    return found
