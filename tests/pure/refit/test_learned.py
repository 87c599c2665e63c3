"""What a watched load teaches of the next ones, and when a load is watched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from returns.pipeline import is_successful

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.errors import OtherPartsRead
from rollsync.pure.refit.kept import kept_layout
from rollsync.pure.refit.layout import Box, Part, whole
from rollsync.pure.refit.learned import (
    Learned,
    confirm,
    is_to_be_watched,
    learn,
    undeclared_ties,
)
from rollsync.pure.refit.load_plan import LoadPlan, PlannedTensor

W = TensorSpec("w", (4, 2), "float32", ("tied",))
NORM = TensorSpec("norm", (2,), "float32")
OTHER = TensorSpec("other", (4,), "float32")
SPECS = (W, NORM, OTHER)
TOP, BOTTOM = Box((0, 0), (2, 2)), Box((2, 0), (2, 2))


def seen(**reads: Box | None) -> LoadPlan:
    """A load that read these boxes of the tensors that it was given."""
    specs = {spec.name: spec for spec in SPECS}
    return LoadPlan(
        tensors={
            name: PlannedTensor(specs[name], (), () if box is None else (box,), "")
            for name, box in reads.items()
        },
        layers=frozenset({"layer"}),
    )


FIRST = seen(w=TOP, norm=whole(NORM), other=None)
KNOWN = learn(SPECS, FIRST, is_shared=True)


def test_a_rank_of_several_learns_its_parts_and_has_to_see_them_loaded() -> None:
    layout = (Part("w", TOP), Part("tied", TOP), Part("norm", whole(NORM)))
    assert Learned(FIRST, layout, frozenset({"w"})) == KNOWN


@pytest.mark.parametrize(
    ("load", "is_shared"),
    [(FIRST, False), (seen(w=whole(W), norm=whole(NORM), other=whole(OTHER)), True)],
    ids=["its only rank", "a rank that keeps everything"],
)
def test_who_keeps_everything_is_sent_whole_tensors(load: LoadPlan, is_shared: bool) -> None:
    assert learn(SPECS, load, is_shared=is_shared) == Learned(load)


def test_names_that_are_tied_for_once_let_nothing_be_read_directly() -> None:
    tied = LoadPlan(FIRST.tensors, FIRST.layers, frozenset({"tied", "norm"}))
    assert undeclared_ties(SPECS, tied) == frozenset({"norm"})
    assert learn(SPECS, tied, is_shared=True) == Learned(
        LoadPlan(), KNOWN.layout, KNOWN.unconfirmed
    )
    declared = LoadPlan(FIRST.tensors, FIRST.layers, frozenset({"tied"}))
    assert learn(SPECS, declared, is_shared=True).plan == declared


def test_parts_that_are_loaded_as_they_were_learned_are_confirmed() -> None:
    confirmed = confirm(KNOWN, SPECS, seen(w=TOP, norm=whole(NORM))).unwrap()
    assert confirmed == Learned(KNOWN.plan, KNOWN.layout)
    assert not is_to_be_watched(confirmed, in_parts=True, directly=True)


def test_what_was_not_loaded_stays_to_be_confirmed() -> None:
    assert confirm(KNOWN, SPECS, seen(norm=whole(NORM))).unwrap() == KNOWN
    assert is_to_be_watched(KNOWN, in_parts=True, directly=False)


@pytest.mark.parametrize("read", [BOTTOM, whole(W), Box((0, 0), (1, 2)), None])
def test_a_loader_that_reads_another_part_is_found_out(read: Box | None) -> None:
    refused = confirm(KNOWN, SPECS, seen(w=read)).failure()
    assert refused.tensor in W.names


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.sets(st.sampled_from([spec.name for spec in SPECS])),
)
def test_a_load_of_parts_is_confirmed_only_if_it_reads_just_them(
    first: list[int], then: list[int], given_: set[str]
) -> None:
    def load(rows: list[int]) -> LoadPlan:
        boxes = {
            spec.name: Box((0,) * len(spec.shape), (min(count, spec.shape[0]), *spec.shape[1:]))
            for spec, count in zip(SPECS, rows, strict=True)
        }
        return seen(**{name: box if box.elements else None for name, box in boxes.items()})

    known, later = learn(SPECS, load(first), is_shared=True), load(then)
    later = LoadPlan({name: each for name, each in later.tensors.items() if name in given_})
    confirmed = confirm(known, SPECS, later)
    loaded = [spec for spec in SPECS if spec.name in known.unconfirmed & given_]
    alike = [kept_layout([spec], later) == kept_layout([spec], load(first)) for spec in loaded]
    assert is_successful(confirmed) == all(alike)
    if is_successful(confirmed):
        assert confirmed.unwrap().unconfirmed == known.unconfirmed - given_
    else:
        assert isinstance(confirmed.failure(), OtherPartsRead)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("directly", [False, True])
def test_a_load_is_watched_when_it_can_teach_something(in_parts: bool, directly: bool) -> None:
    def watched(known: Learned | None) -> bool:
        return is_to_be_watched(known, in_parts=in_parts, directly=directly)

    assert watched(None) == (in_parts or directly)
    assert watched(KNOWN)
    assert not watched(Learned(FIRST, KNOWN.layout))
