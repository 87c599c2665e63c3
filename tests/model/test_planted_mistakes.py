"""The exploration can fail: every planted mistake is caught, in a way that a person can read."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_is_caught(mutant: Mutant) -> None:
    report = explore(mutant.config, mutant.machine)
    print("\n  ".join((f"{mutant.name}, after {report.states} states:", *report.counterexample)))
    assert report.counterexample, "the mistake was not noticed"
    assert mutant.verdict in report.counterexample[-1]
    assert len(report.counterexample) <= 16, "the shortest way is too long to be read"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_without_the_mistake_the_same_world_keeps_the_promise(mutant: Mutant) -> None:
    report = explore(mutant.config)
    assert report.counterexample == ()
    assert report.ends > 0


def test_the_mistakes_are_distinct() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15
