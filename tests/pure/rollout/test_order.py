"""The order of hand-outs covers each epoch once, and pulling in any portions gives the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.rollout.order import HandOutPlace, epoch_order, hand_out, prompts_left
from rollsync.pure.rollout.state import DataloaderState

START = DataloaderState(epoch=0, position=0, dataset_digest="d", seed=3)


@given(size=st.integers(1, 60), seed=st.integers(0, 9), epoch=st.integers(0, 5))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(size, seed=seed, epoch=epoch)) == list(range(size))


def test_the_order_is_the_same_for_ever() -> None:
    assert epoch_order(8, seed=7, epoch=0) == (5, 1, 6, 2, 3, 0, 7, 4)
    assert epoch_order(8, seed=7, epoch=1) != epoch_order(8, seed=7, epoch=0)


@given(
    size=st.integers(1, 7),
    max_epochs=st.integers(1, 3),
    portions=st.lists(st.integers(1, 9), min_size=30, max_size=30),
)
def test_portions_do_not_matter(size: int, max_epochs: int, portions: list[int]) -> None:
    state = START
    places: list[HandOutPlace] = []
    for portion in portions:
        left = prompts_left(state, size=size, max_epochs=max_epochs)
        taken = hand_out(state, size=size, max_epochs=max_epochs, count=portion)
        assert len(taken.places) == min(portion, left)
        places.extend(taken.places)
        state = taken.after
    assert places == [
        HandOutPlace(epoch=epoch, position=position)
        for epoch in range(max_epochs)
        for position in range(size)
    ]
    assert (state.epoch, state.position) == (max_epochs - 1, size)
    assert prompts_left(state, size=size, max_epochs=max_epochs) == 0


def test_an_epoch_turns_with_its_last_sample() -> None:
    taken = hand_out(START, size=4, max_epochs=2, count=4)
    assert (taken.after.epoch, taken.after.position) == (1, 0)
