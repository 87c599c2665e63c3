"""What the ranks of an engine are together, over every combination of three ranks."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from rollsync.pure.refit.engine_ranks import engine_state
from rollsync.pure.refit.lifecycle import (
    Closed,
    Connected,
    EngineState,
    Poisoned,
    Serving,
    Unconnected,
    Updating,
    check_serves,
)

STATES: list[EngineState] = [
    Unconnected(),
    Connected(),
    Updating(1),
    Updating(2),
    Serving(1),
    Serving(2),
    Serving(2, connected=False),
    Poisoned(1, "why"),
    Poisoned(2, "why", connected=False),
    Closed(),
]


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_that_agree_are_what_each_of_them_is(state: EngineState, ranks: int) -> None:
    assert engine_state([state] * ranks) == state


def test_an_engine_without_ranks_serves_nothing() -> None:
    assert engine_state([]) == Unconnected()


def test_an_engine_serves_a_version_only_when_every_rank_does() -> None:
    for ranks in product(STATES, repeat=3):
        serves = check_serves(engine_state(ranks), wanted_version=2) is None
        assert serves == all(check_serves(rank, wanted_version=2) is None for rank in ranks)


def test_the_order_of_the_ranks_does_not_matter_but_for_the_words() -> None:
    for ranks in product(STATES, repeat=3):
        kinds = {type(engine_state(order)) for order in permutations(ranks)}
        assert len(kinds) == 1


@pytest.mark.parametrize(
    ("ranks", "together"),
    [
        (
            [Serving(1), Serving(2)],
            Poisoned(2, "its ranks hold the weight versions 1, 2"),
        ),
        (
            [Connected(), Serving(2)],
            Poisoned(2, "its ranks hold the weight versions none, 2"),
        ),
        ([Serving(1), Poisoned(2, "lost")], Poisoned(2, "lost")),
        ([Serving(1), Updating(1)], Poisoned(1, "its ranks hold the weight versions 1, 1")),
        ([Serving(3), Serving(3, connected=False)], Serving(3, connected=False)),
        ([Connected(), Unconnected()], Unconnected()),
        ([Serving(1), Closed()], Closed()),
    ],
    ids=str,
)
def test_ranks_that_differ(ranks: list[EngineState], together: EngineState) -> None:
    assert engine_state(ranks) == together
