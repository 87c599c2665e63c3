"""What a loader was seen to copy becomes the layout that its rank reports."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.kept import box_of, kept_bytes, kept_layout
from rollsync.pure.refit.layout import Box, Part, check_coverage, plan_parts, whole
from rollsync.pure.refit.load_plan import (
    Copy,
    LoadPlan,
    PlannedTensor,
    Region,
    region_of,
)

W = TensorSpec("w", (4, 6), "float32")
TIED = TensorSpec("e", (8, 2), "bfloat16", ("head",))

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def addresses_of(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Of the elements of a box, in its order."""
    ranges = [range(s, s + n) for s, n in zip(box.starts, box.sizes, strict=True)]
    strides = strides_of(shape)
    return [
        sum(i * step for i, step in zip(index, strides, strict=True))
        for index in itertools.product(*ranges)
    ]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)
    )
    return Box(starts, sizes)


@given(data=st.data(), shape=shapes, item_bytes=st.sampled_from([1, 2, 4, 8]))
def test_a_box_that_a_view_can_be_is_found_in_its_memory(
    data: st.DataObject, shape: tuple[int, ...], item_bytes: int
) -> None:
    box = data.draw(boxes(shape))
    first = addresses_of(box, shape)[0]
    region = region_of(first, box.sizes, strides_of(shape), item_bytes)
    if region is not None:
        assert box_of(region, shape, item_bytes) == box


@given(
    shape=shapes,
    offset=st.integers(0, 30),
    run=st.integers(1, 30),
    runs=st.integers(1, 6),
    gap=st.integers(0, 12),
)
def test_a_region_is_a_box_only_if_they_have_the_same_elements(
    shape: tuple[int, ...], offset: int, run: int, runs: int, gap: int
) -> None:
    stride = run + gap
    addresses = [offset + i * stride + j for i in range(runs) for j in range(run)]
    region = Region(2 * offset, 2 * run, runs, 2 * stride if runs > 1 else 0)
    box = box_of(region, shape, 2)
    if box is not None:
        assert addresses_of(box, shape) == addresses
    elif addresses[-1] < math.prod(shape):
        every = (
            Box(starts, sizes)
            for starts in itertools.product(*(range(n) for n in shape))
            for sizes in itertools.product(
                *(range(1, n - s + 1) for n, s in zip(shape, starts, strict=True))
            )
            if math.prod(sizes) == len(addresses)
        )
        assert all(addresses_of(other, shape) != addresses for other in every)


def test_bytes_that_are_no_elements_are_no_box() -> None:
    assert box_of(Region(2, 4), (4, 6), 4) is None
    assert box_of(Region(0, 6), (4, 6), 4) is None
    assert box_of(Region(0, 0), (4, 6), 4) is None
    assert box_of(Region(0, 8, 2, 10), (4, 6), 4) is None


def planned(spec: TensorSpec, *sources: Region, explained: bool = True) -> PlannedTensor:
    copies = tuple(Copy(source, "parameter", source) for source in sources)
    return PlannedTensor(spec=spec, copies=copies, explained=explained, staged_because="")


def plan_of(*tensors: PlannedTensor) -> LoadPlan:
    return LoadPlan(tensors={each.spec.name: each for each in tensors}, layers=frozenset())


def test_a_rank_keeps_what_its_loader_copied_under_every_name() -> None:
    columns, rows = Region(8, 8, 4, 24), Region(16, 16)
    layout = kept_layout([W, TIED], plan_of(planned(W, columns), planned(TIED, rows)))
    assert layout == (
        Part("w", Box((0, 2), (4, 2))),
        Part("e", Box((4, 0), (4, 2))),
        Part("head", Box((4, 0), (4, 2))),
    )
    assert kept_bytes([W, TIED], layout) == 32 + 16
    (w, tied) = plan_parts([W, TIED], layout, rank=0).unwrap()
    assert w.spec == TensorSpec("w[0:4,2:4]", (4, 2), "float32")
    assert tied.spec == TensorSpec("e[4:8,0:2]", (4, 2), "bfloat16", ("head[4:8,0:2]",))


def test_what_is_not_explained_is_kept_whole_and_what_was_not_read_is_not() -> None:
    half = Region(0, 48)
    for tensor in (
        planned(W, half, explained=False),
        planned(TensorSpec("w", (6, 4), "float32"), half),
        planned(W, half, Region(24, 48)),
        planned(W, Region(4, 32)),
    ):
        assert kept_layout([W], plan_of(tensor)) == (Part("w", whole(W)),)
    assert kept_layout([W], plan_of()) == (Part("w", whole(W)),)
    assert kept_layout([W], plan_of(planned(W))) == ()


def test_parts_that_one_tensor_is_copied_in_stay_apart_and_one_copied_twice_is_one() -> None:
    first, last = Region(0, 24), Region(72, 24)
    layout = kept_layout([W], plan_of(planned(W, first, last, first)))
    assert layout == (Part("w", Box((0, 0), (1, 6))), Part("w", Box((3, 0), (1, 6))))
    assert check_coverage([W], [layout]) is not None
    middle = kept_layout([W], plan_of(planned(W, Region(24, 48))))
    assert check_coverage([W], [layout, middle]) is None
