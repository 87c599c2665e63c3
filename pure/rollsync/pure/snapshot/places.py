"""Names of bundles in a run directory, and their order.

Rule kept here: order is that of numbers, so 100 comes after 9; what has no name of ours is not
ours and is never touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

BOOTSTRAP_DIRECTORY = "bootstrap"
SEGMENTS_DIRECTORY = "segments"
ANCHOR_FILE = "anchor.bin"
LOCK_FILE = "writer.lock"
"""Held by the process that writes to the run directory."""
_STEP = re.compile(r"step_([0-9]{6,})")
_SNAPSHOT = re.compile(r"[0-9]{6,}")
_LEFTOVER = re.compile(r"\.(draft|trash)-[0-9]+-.+")
_SEGMENT = re.compile(r"[0-9a-f]{64}")


class BundlePlace(Struct, frozen=True, kw_only=True, order=True):
    """Where a bundle is. Places compare by age: a later one holds more of the run."""

    step: int
    number: int
    """0: the trainer checkpoint of the step. From 1: a snapshot under it (at step 0, under the
    bootstrap anchor)."""

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a snapshot, which needs the weights of its anchor."""
        return self.number > 0

    @property
    def anchor(self) -> BundlePlace:
        """The place of the trainer checkpoint whose weights a resume starts from."""
        return BundlePlace(step=self.step, number=0)


def anchor_name(step: int) -> str:
    """Directory of a step's trainer checkpoint; at step 0, of the bootstrap anchor."""
    return f"step_{step:06d}" if step else BOOTSTRAP_DIRECTORY


def snapshot_name(number: int) -> str:
    """Directory of a snapshot within its anchor's `snapshots/`."""
    return f"{number:06d}"


def step_of(name: str) -> int | None:
    """The step whose anchor has this directory name, or None if it is not ours."""
    if name == BOOTSTRAP_DIRECTORY:
        return 0
    found = _STEP.fullmatch(name)
    if found is None or anchor_name(int(found[1])) != name:
        return None
    return int(found[1])


def snapshot_of(name: str) -> int | None:
    """The number of the snapshot with this directory name, or None if it is not ours."""
    if _SNAPSHOT.fullmatch(name) is None:
        return None
    number = int(name)
    return number if number > 0 and snapshot_name(number) == name else None


def is_segment(name: str) -> bool:
    """Whether a file in `segments/` with this name is a segment."""
    return _SEGMENT.fullmatch(name) is not None


def draft_name(final: str, taken: Iterable[str]) -> str:
    """A free name for what will be called `final` once it is whole."""
    return _free("draft", final, taken)


def trash_name(former: str, taken: Iterable[str]) -> str:
    """A free name for what was called `former` and is being deleted."""
    return _free("trash", former, taken)


def is_leftover(name: str) -> bool:
    """Whether the name is of something half written or half deleted."""
    return _LEFTOVER.fullmatch(name) is not None


def _free(word: str, name: str, taken: Iterable[str]) -> str:
    used = frozenset(taken)
    number = 0
    while (free := f".{word}-{number}-{name}") in used:
        number += 1
    return free
