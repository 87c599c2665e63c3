"""Names and their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.snapshot.places import (
    BundlePlace,
    anchor_name,
    draft_name,
    is_leftover,
    is_segment,
    snapshot_name,
    snapshot_of,
    step_of,
    trash_name,
)
from rollsync.pure.snapshot.selection import resume_order

numbers = st.integers(min_value=1, max_value=10**9)


@given(numbers)
def test_every_number_has_one_name(number: int) -> None:
    assert step_of(anchor_name(number)) == number
    assert snapshot_of(snapshot_name(number)) == number
    assert step_of(anchor_name(0)) == 0
    for name in (anchor_name(number), snapshot_name(number)):
        assert not is_leftover(name)


def test_what_is_not_ours_has_no_number() -> None:
    for name in ("step_1", "step_0000012", "step_000000", "step_00001a", "Step_000001", "logs"):
        assert step_of(name) is None, name
    for name in ("1", "0000012", "000000", "00001a", "-00001", ".draft-0-000001", "٠٠٠٠٠١"):
        assert snapshot_of(name) is None, name
    for name in ("0" * 63, "0" * 65, "G" * 64, "A" * 64, ".draft-0-" + "0" * 64):
        assert not is_segment(name), name
    assert is_segment("0a" * 32)
    for name in (".git", "draft-0-x", ".draft-x", ".trash-1-", "step_000001"):
        assert not is_leftover(name), name


def test_a_free_name_is_not_taken() -> None:
    taken: list[str] = []
    for _ in range(3):
        for name_for in (draft_name, trash_name):
            name = name_for("step_000001", taken)
            assert name not in taken
            assert is_leftover(name)
            taken.append(name)


def test_order_is_that_of_numbers() -> None:
    places = [BundlePlace(step=2, number=number) for number in (100, 9, 10, 0)]
    places += [BundlePlace(step=step, number=1) for step in (1000000, 999999, 0)]
    assert [(place.step, place.number) for place in resume_order(places)] == [
        (1000000, 1),
        (999999, 1),
        (2, 100),
        (2, 10),
        (2, 9),
        (2, 0),
        (0, 1),
    ]
