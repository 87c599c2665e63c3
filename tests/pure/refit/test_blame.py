"""Because of whom a step failed: every way that it can end on a few workers."""

from __future__ import annotations

from itertools import product

import pytest

from rollsync.pure.refit.blame import (
    CAUSES_FIRST,
    OWN,
    HowEnded,
    StepEnd,
    place_of_cause,
    refused,
    to_blame,
)

RANKS = [["policy 0"], ["rollout 0", "rollout 1"], ["rollout 2", "rollout 3"]]
POLICY, FIRST, SECOND = range(3)
ENDS = [
    *(StepEnd(how) for how in HowEnded),
    StepEnd(HowEnded.TIMED_OUT, ("policy 0",)),
    StepEnd(HowEnded.TIMED_OUT, ("rollout 1",)),
    StepEnd(HowEnded.TIMED_OUT, ("rollout 2",)),
]
DONE, HEARD = StepEnd(HowEnded.DONE), StepEnd(HowEnded.HEARD)


def waited_for(*names: str) -> StepEnd:
    return StepEnd(HowEnded.TIMED_OUT, names)


@pytest.mark.parametrize("policy", ENDS)
def test_whoever_is_blamed_failed_itself_or_was_waited_for_in_vain(policy: StepEnd) -> None:
    for first, second in product(ENDS, ENDS):
        ends = [policy, first, second]
        blamed = to_blame(ends, RANKS)
        own = {place for place, end in enumerate(ends) if end.how in OWN}
        late = [end for end in ends if end.how is HowEnded.TIMED_OUT]
        named = {name for end in late for name in end.waited_for}
        if own:
            assert blamed == own
        elif named:
            assert blamed
            assert all(not named.isdisjoint(RANKS[place]) for place in blamed)
        else:
            # Somebody waited in vain and does not say for whom: nothing better is known.
            assert blamed == {place for place, end in enumerate(ends) if end in late}
        cause = ends[place_of_cause(ends)]
        assert all(CAUSES_FIRST.index(cause.how) <= CAUSES_FIRST.index(end.how) for end in ends)


@pytest.mark.parametrize("how", [HowEnded.SILENT, HowEnded.HEARD, HowEnded.DONE])
def test_a_stuck_policy_worker_blames_no_engine(how: HowEnded) -> None:
    """Also when it goes on at last, after all others gave up."""
    ends = [StepEnd(how), waited_for("policy 0"), waited_for("policy 0")]
    assert to_blame(ends, RANKS) == {POLICY}


@pytest.mark.parametrize("how", [HowEnded.SILENT, HowEnded.HEARD, HowEnded.DONE])
def test_a_stuck_engine_is_to_blame_and_not_those_that_waited_for_it(how: HowEnded) -> None:
    assert to_blame([waited_for("rollout 1"), StepEnd(how), HEARD], RANKS) == {FIRST}


def test_of_a_chain_of_those_that_waited_the_first_link_is_to_blame() -> None:
    ends = [HEARD, waited_for("policy 0"), waited_for("rollout 0")]
    assert to_blame(ends, RANKS) == {POLICY}


def test_of_a_ring_of_those_that_waited_all_are_to_blame() -> None:
    ends = [waited_for("rollout 0"), waited_for("policy 0"), HEARD]
    assert to_blame(ends, RANKS) == {POLICY, FIRST}


def test_nobody_is_to_blame_for_a_step_that_went_well_or_is_only_heard_of() -> None:
    assert to_blame([DONE, DONE, DONE], RANKS) == frozenset()
    assert to_blame([HEARD, HEARD, DONE], RANKS) == frozenset()


def test_an_engine_that_says_that_it_did_not_load_has_refused() -> None:
    loaded: list[object] = [None, True, 1, [True], {"loaded": 3}]
    for place, answer in enumerate((False, 0, [], "", {})):
        assert refused([*loaded[:place], answer, *loaded[place:]]) == (place,)
    assert refused(loaded) == ()
    assert refused([False, None, 0]) == (0, 2)
