"""The order in which the dataloader hands out the dataset's samples.

Rule kept here: the order is a function of size, seed and epoch alone, on every machine and in
every version of Python, so that a resume goes on exactly where the run stopped.
"""

from __future__ import annotations

from hashlib import sha256

from msgspec import Struct
from msgspec.structs import replace

from rollsync.pure.rollout.state import DataloaderState


class HandOutPlace(Struct, frozen=True, kw_only=True):
    """One place in the order of hand-outs."""

    epoch: int
    position: int
    """Position in the epoch's order, from 0."""

    @property
    def prompt_id(self) -> str:
        """Prompt id of the hand-out at this place."""
        return f"e{self.epoch}-p{self.position:06d}"


class HandOut(Struct, frozen=True, kw_only=True):
    """The next places in the order, and where the dataloader goes on after them."""

    places: tuple[HandOutPlace, ...]
    after: DataloaderState


def epoch_order(size: int, *, seed: int, epoch: int) -> tuple[int, ...]:
    """Sample indices `0..size-1` in the epoch's order. O(n log n): keep it for the epoch."""

    def rank(index: int) -> bytes:
        return sha256(f"{seed}/{epoch}/{index}".encode()).digest()

    return tuple(sorted(range(size), key=rank))


def prompts_left(state: DataloaderState, *, size: int, max_epochs: int) -> int:
    """How many hand-outs are still to come."""
    return max(0, (max_epochs - state.epoch) * size - state.position)


def hand_out(state: DataloaderState, *, size: int, max_epochs: int, count: int) -> HandOut:
    """The next `count` hand-outs, fewer where the last epoch ends. A batch may span epochs.

    After the last sample of an epoch the position is that of the next epoch's first, except at the
    end of the last epoch, where it stays.
    """
    places: list[HandOutPlace] = []
    epoch, position = state.epoch, state.position
    for _ in range(min(count, prompts_left(state, size=size, max_epochs=max_epochs))):
        if position == size:
            epoch, position = epoch + 1, 0
        places.append(HandOutPlace(epoch=epoch, position=position))
        position += 1
    if position == size and epoch + 1 < max_epochs:
        epoch, position = epoch + 1, 0
    return HandOut(places=tuple(places), after=replace(state, epoch=epoch, position=position))
