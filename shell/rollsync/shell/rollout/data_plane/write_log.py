"""The order in which rows of a partition were written, so that a save looks at the newest only.

Rule kept here: what a log says at a moment stays so, whatever is written later; and a log is hardly
longer than twice the partition's rows, so keeping it costs the same for each write.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable

Entry = tuple[int, str]
"""Number of the write, from 1, and the key."""


class WriteLog:
    """Keys of one partition in the order of their writes. Never changed, only added to at its end
    or left for a shorter one."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._number = 0

    def note(self, keys: Iterable[str], *, held: Collection[str]) -> None:
        """These rows were written.

        Args:
            held: every key of the partition after it.
        """
        for key in keys:
            self._number += 1
            self._entries.append((self._number, key))
        if len(self._entries) > 2 * len(held) + 64:
            newest = {key: number for number, key in self._entries if key in held}
            self._entries = sorted((number, key) for key, number in newest.items())

    def pin(self) -> PinnedLog:
        """The log as it is now. O(1)."""
        return PinnedLog(self._entries, self._number)


class PinnedLog:
    """A log at a moment."""

    def __init__(self, entries: list[Entry], number: int) -> None:
        self._entries = entries
        self.writes = number
        """How many writes there had been."""

    def since(self, writes: int) -> frozenset[str]:
        """Keys of the rows that were written after so many writes, and are there (or were cleared
        since)."""
        first = bisect_right(self._entries, writes, key=_number)
        last = bisect_right(self._entries, self.writes, key=_number)
        return frozenset(key for _, key in self._entries[first:last])


def _number(entry: Entry) -> int:
    return entry[0]
