"""A rollout state that lies in a chain: a whole state, then the differences that came after it.

Rule kept here: a chain is read in full or not at all, and what refuses it says which link.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.codecs.errors import DecodeError
from rollsync.codecs.rollout.state import ROLLOUT_STATE
from rollsync.codecs.rollout.state_diff import STATE_DIFF
from rollsync.pure.rollout.diff import RolloutStateDiff, patch
from rollsync.pure.rollout.newest import NewestPart, part_of_difference, part_of_whole
from rollsync.pure.rollout.state import RolloutState


class BrokenLink(Struct, frozen=True, kw_only=True):
    """A link of a chain that is not what it should be."""

    index: int
    """In the chain, from 0."""
    error: DecodeError


class ReadChain(Struct, frozen=True, kw_only=True):
    """What a chain holds."""

    state: RolloutState
    newest: NewestPart
    """What its last link put into the state."""


def read_chain(links: Iterable[bytes]) -> Result[ReadChain, BrokenLink]:
    """The state of a chain.

    Args:
        links: envelopes, the first of kind `rollout.state`, the others of `rollout.state-diff`.
            They are taken one at a time, so that only one needs to be in memory.

    Raises:
        ValueError: there is no link.
    """
    state: RolloutState | None = None
    difference: RolloutStateDiff | None = None
    for index, data in enumerate(links):
        if state is None:
            whole = ROLLOUT_STATE.decode(data)
            if not is_successful(whole):
                return Failure(BrokenLink(index=index, error=whole.failure()))
            state = whole.unwrap()
        else:
            change = STATE_DIFF.decode(data)
            if not is_successful(change):
                return Failure(BrokenLink(index=index, error=change.failure()))
            difference = change.unwrap()
            state = patch(state, difference)
    if state is None:
        raise ValueError("a chain has at least its base")
    newest = part_of_whole(state) if difference is None else part_of_difference(difference)
    return Success(ReadChain(state=state, newest=newest))
