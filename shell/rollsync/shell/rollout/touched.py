"""Remembers which groups the run has touched since the last save.

Rules kept here: a cut costs the same however many there are; what was touched before a save that
failed is touched still; and where events do not tell the whole story, nothing is claimed.
"""

from __future__ import annotations

from msgspec import Struct

from rollsync.pure.rollout.events import RolloutEvent
from rollsync.pure.rollout.state import RolloutState
from rollsync.pure.rollout.touched import touched_groups
from rollsync.shell.rollout.cell import StateCell


class TouchedAtCut(Struct, frozen=True, kw_only=True):
    """Groups touched between the last save and a cut."""

    parts: tuple[set[str], ...]
    """Nothing is added to them any more."""
    restores: int
    """Of the cell, at the cut: groups of two moments belong together only if this is the same."""

    def groups(self) -> frozenset[str]:
        """Every group. O(touched)."""
        return frozenset().union(*self.parts)


class TouchedGroups:
    """Listens to a cell.

    Args:
        cell: the run's state.
    """

    def __init__(self, cell: StateCell) -> None:
        self._cell = cell
        self._before = cell.state
        self._parts: list[set[str]] = [set()]
        cell.listen(self._saw)

    def cut(self) -> TouchedAtCut:
        """What was touched so far. To be called inside the exclusive cut."""
        parts = tuple(self._parts)
        self._parts.append(set())
        return TouchedAtCut(parts=parts, restores=self._cell.restores)

    def saved(self, cut: TouchedAtCut) -> None:
        """Forget what a save that succeeded has seen."""
        del self._parts[: len(cut.parts)]

    def _saw(self, event: RolloutEvent, after: RolloutState) -> None:
        self._parts[-1].update(touched_groups(self._before, event))
        self._before = after
