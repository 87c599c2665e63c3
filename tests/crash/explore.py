"""Crashes a run after every operation, in every way, and asks each time what a resume finds."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field

from rollsync.shell.errors import RollsyncError
from tests.crash.disk import Disk, Tree
from tests.crash.operations import Operation, SimulatedFileSystem, replay
from tests.crash.scenario import Mixture, check_all_whole, found


class Lost(AssertionError):
    """A resume does not find what it should."""


@dataclass
class Count:
    """How many states were looked at."""

    states: int = 0
    """Left by a crash, with repetitions."""
    distinct: int = 0
    found: Counter[int] = field(default_factory=Counter)
    """Saves that distinct states had."""

    def __str__(self) -> str:
        return f"{self.states:,} states of the disk, {self.distinct:,} distinct ones resumed from"


TOTAL = Count()
"""Of the whole test run."""


@dataclass
class Explorer:
    """Looks at each distinct state once."""

    count: Count = field(default_factory=Count)
    _seen: dict[bytes, int] = field(default_factory=dict)

    def check(self, tree: Tree, allowed: Iterable[int], at: str) -> int:
        """Resume from what a crash left.

        Raises:
            Lost: it finds another save than those allowed, or none, or a mixture.
        """
        self.count.states += 1
        TOTAL.states += 1
        key = fingerprint(tree)
        number = self._seen.get(key)
        if number is None:
            number = self._look(tree, at)
            self._seen[key] = number
            self.count.distinct += 1
            TOTAL.distinct += 1
            self.count.found[number] += 1
        if number not in allowed:
            raise Lost(f"{at}: a resume finds save {number}, expected one of {sorted(allowed)}")
        return number

    def _look(self, tree: Tree, at: str) -> int:
        files = SimulatedFileSystem.after(tree)
        try:
            number = found(files)
            check_all_whole(files)
        except (RollsyncError, OSError, Mixture) as error:
            raise Lost(f"{at}: {error}") from error
        if files.changes:
            raise Lost(f"{at}: choosing what to resume from wrote: {files.changes[0]}")
        return number

    def crash_everywhere(
        self,
        before: Disk,
        operations: list[Operation],
        *,
        points: Collection[int],
        allowed: set[int],
        committed: int,
        committed_after: int,
    ) -> None:
        """Lose power after some or all of the operations.

        Args:
            before: the disk before the first one.
            points: after how many operations to crash.
            allowed: saves that a resume may find while the save is under way.
            committed: the one that it has to find afterwards.
            committed_after: how many operations the save has; those that follow are a prune.
        """
        for done, disk in enumerate(replay(before, operations)):
            if done not in points:
                continue
            last = str(operations[done - 1]) if done else "nothing"
            at = f"after {done} of {len(operations)} operations, the last: {last}"
            expected = allowed if done < committed_after else {committed}
            self.check(disk.visible(), expected, f"process killed {at}")
            for tree in disk.after_power_loss(done):
                self.check(tree, expected, f"power lost {at}")


def fingerprint(tree: Tree) -> bytes:
    """Equal for equal trees."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, tree)
    return digest.digest()


def _feed(digest: hashlib.blake2b, tree: Tree) -> None:
    for name in sorted(tree):
        item = tree[name]
        digest.update(os.fsencode(name) + b"\0")
        if isinstance(item, bytes):
            digest.update(b"f%d\0" % len(item) + item)
        else:
            digest.update(b"d")
            _feed(digest, item)
    digest.update(b"\1")


def recorded(files: SimulatedFileSystem, since: int) -> list[Operation]:
    """The changing operations after the first `since` calls."""
    return SimulatedFileSystem(operations=files.operations[since:]).changes


def snapshot(files: SimulatedFileSystem) -> Disk:
    """The disk as it is now, to replay from."""
    return deepcopy(files.disk)
