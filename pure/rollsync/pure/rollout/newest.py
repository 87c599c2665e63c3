"""The groups that a save's newest link of the state brings: all of a whole state, or what changed.

The metadata beside a save's rows describes these, and not every group of the state, so that it
grows as the link does. Rule kept here: order is that of the metadata, ledger groups by id and ready
groups as they were committed.
"""

from __future__ import annotations

from msgspec import Struct
from rpds import HashTrieMap

from rollsync.pure.rollout.diff import RolloutStateDiff
from rollsync.pure.rollout.persistent import values_of
from rollsync.pure.rollout.state import (
    ReplayGroup,
    RolloutRecoveryLedger,
    RolloutState,
)


class NewestPart(Struct, frozen=True, kw_only=True):
    """Groups that a link puts into the state."""

    ledger: RolloutRecoveryLedger
    replay: tuple[ReplayGroup, ...]
    """In commit order."""


def part_of_whole(state: RolloutState) -> NewestPart:
    """Every group. O(n log n)."""
    return NewestPart(ledger=state.ledger, replay=_in_commit_order(values_of(state.replay)))


def part_of_difference(change: RolloutStateDiff) -> NewestPart:
    """Groups that are new or have changed."""
    return NewestPart(
        ledger=RolloutRecoveryLedger(groups=HashTrieMap(change.ledger.put)),
        replay=_in_commit_order([group for _, group in change.replay.put]),
    )


def _in_commit_order(groups: list[ReplayGroup]) -> tuple[ReplayGroup, ...]:
    return tuple(sorted(groups, key=lambda group: group.commit_index))
