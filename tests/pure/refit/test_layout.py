"""Destination layouts: every element that a rank keeps is sent to it once, and nothing else."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import TensorSpec, describe, plan_buckets
from rollsync.pure.refit.errors import (
    PartOutOfBounds,
    PartsOverlap,
    TensorNotCovered,
    UnknownTensor,
)
from rollsync.pure.refit.layout import (
    PART_BYTES,
    Box,
    Part,
    check_coverage,
    joined,
    part_name,
    parts_of,
    plan_parts,
    sent_bytes,
    slice_of,
    union_elements,
    whole,
)

Element = tuple[int, ...]


def elements_of(box: Box) -> set[Element]:
    ranges = [range(start, start + size) for start, size in zip(box.starts, box.sizes, strict=True)]
    return set(product(*ranges))


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return [
        TensorSpec(f"t{i}", shape, "int8", (f"alias{i}",) if tied else ())
        for i, (shape, tied) in enumerate(
            draw(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=3))
        )
    ]


@st.composite
def boxes(draw: st.DrawFn, spec: TensorSpec) -> Box:
    starts, sizes = [], []
    for length in spec.shape:
        start = draw(st.integers(0, length))
        starts.append(start)
        sizes.append(draw(st.integers(0, length - start)))
    return Box(tuple(starts), tuple(sizes))


@st.composite
def layouts(draw: st.DrawFn, specs: list[TensorSpec]) -> list[Part]:
    """Parts of one rank, disjoint under each name."""
    parts: list[Part] = []
    kept: dict[str, set[Element]] = {}
    for _ in range(draw(st.integers(0, 6))):
        spec = draw(st.sampled_from(specs))
        name = draw(st.sampled_from([spec.name, *spec.aliases]))
        box = draw(boxes(spec))
        elements = elements_of(box)
        if Part(name, box) in parts or elements & kept.get(name, set()):
            continue
        parts.append(Part(name, box))
        kept.setdefault(name, set()).update(elements)
    return parts


@given(st.data())
def test_every_element_that_a_rank_keeps_is_sent_once_under_each_of_its_names(
    data: st.DataObject,
) -> None:
    specs = data.draw(tensors())
    layout = data.draw(layouts(specs))
    sent = plan_parts(specs, layout, rank=0).unwrap()
    arrived: dict[str, list[Element]] = {}
    for part in sent:
        assert part.spec.shape == part.box.sizes
        for name in (part.spec.name, *part.spec.aliases):
            arrived.setdefault(name.partition("[")[0], []).extend(elements_of(part.box))
    for name in {name for spec in specs for name in spec.names}:
        kept = [element for p in layout if p.name == name for element in elements_of(p.box)]
        assert sorted(arrived.get(name, [])) == sorted(kept)
    sources = [part.source for part in sent]
    order = [spec.name for spec in specs]
    assert sources == sorted(sources, key=order.index)
    plan_buckets([part.spec for part in sent], 256).unwrap()


@given(st.data())
def test_the_bytes_that_are_sent_are_those_of_the_parts(data: st.DataObject) -> None:
    specs = data.draw(tensors())
    ranks = data.draw(st.lists(layouts(specs), max_size=3))
    sizes = sent_bytes(specs, enumerate(ranks)).unwrap()
    assert len(sizes) == len(ranks)
    for layout, own in zip(ranks, sizes, strict=True):
        parts: dict[str, list[int]] = {}
        for part in plan_parts(specs, layout, rank=0).unwrap():
            parts.setdefault(part.source, []).append(part.spec.tensor_bytes)
        assert [list(each) for each in own] == list(parts.values())


def test_a_layout_that_is_wrong_is_refused_with_the_rank_of_who_keeps_it() -> None:
    spec = TensorSpec("t", (2,), "int8")
    fine, stranger = Part("t", whole(spec)), Part("x", whole(spec))
    error = sent_bytes([spec], [(4, [fine]), (7, [stranger])]).failure()
    assert error == UnknownTensor(rank=7, tensor="x")


@given(st.data())
def test_the_elements_of_boxes_that_overlap_are_counted_once(data: st.DataObject) -> None:
    spec = TensorSpec("t", tuple(data.draw(st.lists(st.integers(0, 4), max_size=3))), "int8")
    some = data.draw(st.lists(boxes(spec), max_size=5))
    assert union_elements(some) == len({each for box in some for each in elements_of(box)})


@given(st.data())
def test_coverage_is_whether_the_ranks_together_keep_every_element(data: st.DataObject) -> None:
    specs = data.draw(tensors())
    ranks = data.draw(st.lists(layouts(specs), max_size=3))
    missing = check_coverage(specs, ranks)
    for spec in specs:
        names = spec.names
        own = [part.box for layout in ranks for part in layout if part.name in names]
        held = {element for box in own for element in elements_of(box)}
        if held != elements_of(whole(spec)) or not own:
            assert missing == TensorNotCovered(
                tensor=spec.name, elements=len(elements_of(whole(spec))), held=len(held)
            )
            assert repr(spec.name) in describe(missing)
            return
    assert missing is None


MATRIX = TensorSpec("m", (4, 6), "float32")
TIED = TensorSpec("embed", (8, 2), "bfloat16", ("head",))


def test_parts_are_named_by_what_they_are_of_the_tensor() -> None:
    assert part_name("m", MATRIX, whole(MATRIX)) == "m"
    assert part_name("m", MATRIX, slice_of(MATRIX, 1, 3, 3)) == "m[0:4,3:6]"
    sent = plan_parts([MATRIX], [Part("m", slice_of(MATRIX, 0, 2, 2))], rank=0).unwrap()
    assert [part.spec for part in sent] == [TensorSpec("m[2:4,0:6]", (2, 6), "float32")]


def test_two_parts_of_one_tensor_come_in_the_order_of_their_starts() -> None:
    layout = [Part("m", slice_of(MATRIX, 0, 3, 1)), Part("m", slice_of(MATRIX, 0, 0, 2))]
    sent = plan_parts([MATRIX], layout, rank=0).unwrap()
    assert [part.spec.name for part in sent] == ["m[0:2,0:6]", "m[3:4,0:6]"]


def test_tied_weights_on_one_rank_are_sent_once() -> None:
    half = slice_of(TIED, 0, 4, 4)
    sent = plan_parts([TIED], [Part("head", half), Part("embed", half)], rank=0).unwrap()
    assert [part.spec for part in sent] == [
        TensorSpec("embed[4:8,0:2]", (4, 2), "bfloat16", ("head[4:8,0:2]",))
    ]


def test_tied_weights_on_different_pipeline_ranks_are_sent_to_each_under_its_name() -> None:
    first, last = [Part("embed", whole(TIED))], [Part("head", whole(TIED))]
    assert plan_parts([TIED], first, rank=0).unwrap()[0].spec == TensorSpec(
        "embed", (8, 2), "bfloat16"
    )
    assert plan_parts([TIED], last, rank=1).unwrap()[0].spec == TensorSpec(
        "head", (8, 2), "bfloat16"
    )
    assert check_coverage([TIED], [first, last]) is None


def test_tied_weights_that_a_rank_cuts_in_two_ways_are_two_parts() -> None:
    layout = [Part("embed", slice_of(TIED, 0, 0, 6)), Part("head", slice_of(TIED, 0, 4, 4))]
    sent = plan_parts([TIED], layout, rank=0).unwrap()
    assert [part.spec.name for part in sent] == ["embed[0:6,0:2]", "head[4:8,0:2]"]


@pytest.mark.parametrize(
    "layout",
    [
        [Part("m", whole(MATRIX)), Part("m", whole(MATRIX))],
        [Part("m", slice_of(MATRIX, 0, 0, 3)), Part("m", slice_of(MATRIX, 1, 0, 1))],
    ],
)
def test_bytes_that_a_rank_wants_twice_are_refused(layout: list[Part]) -> None:
    error = plan_parts([MATRIX], layout, rank=3).failure()
    assert error == PartsOverlap(rank=3, tensor="m")
    assert "rank 3" in describe(error)


def test_an_unknown_tensor_is_refused() -> None:
    error = plan_parts([MATRIX], [Part("n", whole(MATRIX))], rank=2).failure()
    assert error == UnknownTensor(rank=2, tensor="n")
    assert "'n'" in describe(error)


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 1), (4, 6)),
        Box((-1, 0), (1, 1)),
        Box((0, 0), (1, -1)),
        Box((0,), (4,)),
        Box((0, 0), (4,)),
        Box((), ()),
    ],
)
def test_a_part_outside_its_tensor_is_refused(box: Box) -> None:
    error = plan_parts([MATRIX], [Part("m", box)], rank=1).failure()
    assert error == PartOutOfBounds(
        rank=1, tensor="m", starts=box.starts, sizes=box.sizes, shape=(4, 6)
    )
    assert "[4, 6]" in describe(error)


def test_a_rank_that_keeps_nothing_is_sent_nothing() -> None:
    assert plan_parts([MATRIX], [], rank=0).unwrap() == ()


@given(st.data())
def test_joined_boxes_have_the_same_elements(data: st.DataObject) -> None:
    spec = TensorSpec("t", tuple(data.draw(st.lists(st.integers(1, 4), max_size=3))), "int8")
    drawn = data.draw(st.lists(boxes(spec), max_size=6))
    together = joined(drawn)
    assert set[Element]().union(*map(elements_of, together)) == set[Element]().union(
        *map(elements_of, drawn)
    )
    assert len(together) <= len(drawn)
    assert joined(reversed(drawn)) == together
    if sum(box.elements for box in set(drawn)) == len(
        set[Element]().union(*map(elements_of, drawn))
    ):
        assert sum(box.elements for box in together) == sum(box.elements for box in set(drawn))


@given(st.data())
def test_a_tensor_in_pieces_is_joined_to_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *data.draw(st.sets(st.integers(0, n)))}) for n in shape]
    pieces = [
        Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
        for ranges in product(*(list(pairwise(edges)) for edges in cuts))
    ]
    assert joined(data.draw(st.permutations(pieces))) == (Box((0,) * len(shape), shape),)


def test_experts_that_are_neighbours_make_one_part_and_others_make_their_own() -> None:
    experts = TensorSpec("e", (8, 4, 2), "float32")
    halves = [Box((e, row, 0), (1, 2, 2)) for e in (0, 1, 2, 5, 7) for row in (2, 0)]
    assert parts_of(experts, halves) == (
        Box((0, 0, 0), (3, 4, 2)),
        Box((5, 0, 0), (1, 4, 2)),
        Box((7, 0, 0), (1, 4, 2)),
    )
    gates = [Box((e, 0, 0), (1, 2, 2)) for e in range(8)]
    assert parts_of(experts, gates) == (Box((0, 0, 0), (8, 2, 2)),)


def test_a_large_part_is_cut_by_rows_and_a_whole_tensor_is_not() -> None:
    row = PART_BYTES // 4
    large = TensorSpec("l", (18, 2, row // 2), "int8")
    assert parts_of(large, [whole(large)]) == (whole(large),)
    assert parts_of(large, [slice_of(large, 0, 3, 10)]) == (
        slice_of(large, 0, 3, 4),
        slice_of(large, 0, 7, 4),
        slice_of(large, 0, 11, 2),
    )
    wide = TensorSpec("w", (2, PART_BYTES), "bfloat16")
    assert parts_of(wide, [slice_of(wide, 1, 0, PART_BYTES - 1)]) == (
        Box((0, 0), (1, PART_BYTES - 1)),
        Box((1, 0), (1, PART_BYTES - 1)),
    )
    scalar = TensorSpec("s", (), "int64")
    assert parts_of(scalar, [whole(scalar)]) == (whole(scalar),)
    assert parts_of(scalar, []) == ()
