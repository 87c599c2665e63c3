"""Which attempt goes to an engine next, in every status that the last one may have."""

from __future__ import annotations

import pytest

from rollsync.pure.rollout.dispatch import next_dispatch
from rollsync.pure.rollout.events import AttemptAbandoned, AttemptFailed, RolloutEvent
from tests.pure.rollout.events_kit import admitted, after, dispatch, seal

FAILED = AttemptFailed(group_id="e0p0", sibling_index=0, attempt_index=0)
ABANDONED = AttemptAbandoned(group_id="e0p0", sibling_index=0, attempt_index=0)


@pytest.mark.parametrize(
    ("events", "attempt"),
    [
        ((), 0),
        ((dispatch("e0p0", 0),), None),
        ((dispatch("e0p0", 0), seal("e0p0", 0)), None),
        ((dispatch("e0p0", 0), FAILED), 1),
        ((dispatch("e0p0", 0), ABANDONED), 1),
        ((dispatch("e0p0", 0), FAILED, dispatch("e0p0", 0, 1)), None),
    ],
    ids=["reserved", "dispatched", "sealed", "failed", "abandoned", "second dispatched"],
)
def test_the_next_dispatch(events: tuple[RolloutEvent, ...], attempt: int | None) -> None:
    state = after(admitted(0), *events)
    found = next_dispatch(state.ledger.groups["e0p0"], 0)
    assert found == (None if attempt is None else dispatch("e0p0", 0, attempt))
    if found is not None:
        after(state, found)  # It is one that the state allows.


def test_siblings_are_independent() -> None:
    state = after(admitted(0), dispatch("e0p0", 0))
    assert next_dispatch(state.ledger.groups["e0p0"], 1) == dispatch("e0p0", 1)
