"""Because of which workers a step of a sync failed, from how it ended on each.

Rule kept here: whoever waits in vain is not to blame, but the one that it waited for. So a worker
that is stuck costs nobody else anything, although all that wait for it give up before it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct


class HowEnded(StrEnum):
    """How a step ended on a worker."""

    DONE = "done"
    FAILED = "failed"
    """By itself."""
    GONE = "gone"
    """Its process has ended, or Ray cannot reach it."""
    SILENT = "silent"
    """It had not ended when it was not waited for any longer."""
    TIMED_OUT = "timed_out"
    """It waited for another worker until its deadline."""
    HEARD = "heard"
    """It was told, or saw, that another worker failed."""


class StepEnd(Struct, frozen=True):
    """The end of a step on one worker, which may lead several ranks."""

    how: HowEnded
    waited_for: tuple[str, ...] = ()
    """Of one that timed out: the ranks that it waited for, as `policy 0` or `rollout 3`; empty when
    it does not say."""


OWN: Final = frozenset({HowEnded.FAILED, HowEnded.GONE, HowEnded.SILENT})
"""Ends that are a worker's own doing, whatever became of the others."""

CAUSES_FIRST: Final = (
    HowEnded.FAILED,
    HowEnded.GONE,
    HowEnded.SILENT,
    HowEnded.TIMED_OUT,
    HowEnded.HEARD,
    HowEnded.DONE,
)
"""From the end that says most of why a step failed to the one that says least."""


def to_blame(ends: Sequence[StepEnd], ranks: Sequence[Sequence[str]]) -> frozenset[int]:
    """The workers because of which a step failed, by their place in `ends`.

    Args:
        ends: how it ended on each worker.
        ranks: the ranks that each worker leads, as they are called in `waited_for`.
    """
    own = {place for place, end in enumerate(ends) if end.how in OWN}
    if own:
        return frozenset(own)
    late = {place: end for place, end in enumerate(ends) if end.how is HowEnded.TIMED_OUT}
    names = {name for end in late.values() for name in end.waited_for}
    awaited = {place for place, led in enumerate(ranks) if not names.isdisjoint(led)}
    # In a chain only the first was not waiting itself. In a ring all were.
    return frozenset(awaited - late.keys() or awaited or late)


def refused(updates: Sequence[object]) -> tuple[int, ...]:
    """The engines, by their place, that say that they did not load the weights. With None one has
    no opinion."""
    return tuple(i for i, update in enumerate(updates) if update is not None and not update)


def place_of_cause(ends: Sequence[StepEnd]) -> int:
    """The worker whose end says most of why the step failed."""
    return min(range(len(ends)), key=lambda place: CAUSES_FIRST.index(ends[place].how))
