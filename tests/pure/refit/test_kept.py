"""What a loader was seen to read becomes the layout that its rank reports."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.kept import box_of_view, kept_bytes, kept_layout
from rollsync.pure.refit.layout import Box, Part, check_coverage, plan_parts, whole
from rollsync.pure.refit.load_plan import LoadPlan, PlannedTensor

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


@given(data=st.data(), shape=shapes)
def test_a_view_that_is_a_box_is_found_however_it_is_seen(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    box = data.draw(boxes(shape))
    strides = strides_of(shape)
    order = data.draw(st.permutations(range(len(shape))))
    sizes, steps = [box.sizes[d] for d in order], [strides[d] for d in order]
    if data.draw(st.booleans()):
        # Seen several times, as an expanded view sees it.
        sizes, steps = [3, *sizes], [0, *steps]
    assert box_of_view(addresses_of(box, shape)[0], sizes, steps, shape) == box


@given(
    shape=shapes,
    offset=st.integers(0, 30),
    dimensions=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), max_size=3),
)
def test_a_view_is_a_box_only_if_they_have_the_same_elements(
    shape: tuple[int, ...], offset: int, dimensions: list[tuple[int, int]]
) -> None:
    sizes, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    addresses = {
        offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, sizes))
    }
    box = box_of_view(offset, sizes, strides, shape)
    if box is not None:
        assert set(addresses_of(box, shape)) == addresses


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_what_pytorch_splits_and_turns_is_a_box(
    experts: int, width: int, data: st.DataObject
) -> None:
    """An expert's half of the rows, or of the columns, of a tensor that holds all experts."""
    turned = data.draw(st.booleans())
    shape = (experts, 3, 2 * width) if turned else (experts, 2 * width, 3)
    expert, half = data.draw(st.integers(0, experts - 1)), data.draw(st.integers(0, 1))
    step = 1 if turned else 3
    offset = expert * 6 * width + half * width * step
    other = (3, 2 * width) if turned else (3, 1)
    box = box_of_view(offset, (width, other[0]), (step, other[1]), shape)
    part = (half * width, width)
    assert box == (
        Box((expert, 0, part[0]), (1, 3, width))
        if turned
        else Box((expert, part[0], 0), (1, width, 3))
    )


def planned(spec: TensorSpec, *reads: Box) -> PlannedTensor:
    return PlannedTensor(spec=spec, copies=(), reads=reads, staged_because="")


def plan_of(*tensors: PlannedTensor) -> LoadPlan:
    return LoadPlan(tensors={each.spec.name: each for each in tensors}, layers=frozenset())


def test_a_rank_keeps_what_its_loader_read_under_every_name() -> None:
    columns, rows = Box((0, 2), (4, 2)), Box((4, 0), (4, 2))
    layout = kept_layout([W, TIED], plan_of(planned(W, columns), planned(TIED, rows)))
    assert layout == (Part("w", columns), Part("e", rows), Part("head", rows))
    assert kept_bytes([W, TIED], layout) == 32 + 16
    (w, tied) = plan_parts([W, TIED], layout, rank=0).unwrap()
    assert w.spec == TensorSpec("w[0:4,2:4]", (4, 2), "float32")
    assert tied.spec == TensorSpec("e[4:8,0:2]", (4, 2), "bfloat16", ("head[4:8,0:2]",))


def test_what_is_no_boxes_of_the_declared_tensor_is_kept_whole_and_what_was_not_read_is_not() -> (
    None
):
    half = Box((0, 0), (2, 6))
    for tensor in (
        planned(TensorSpec("w", (6, 4), "float32"), half),
        planned(W, half, whole(W)),
        planned(W, half, Box((1, 0), (3, 2))),
    ):
        assert kept_layout([W], plan_of(tensor)) == (Part("w", whole(W)),)
    assert kept_layout([W], plan_of()) == (Part("w", whole(W)),)
    assert kept_layout([W], plan_of(planned(W))) == ()
    empty = TensorSpec("w", (0, 4), "float32")
    assert kept_layout([empty], plan_of(planned(empty))) == (Part("w", whole(empty)),)


def test_parts_that_lie_apart_stay_apart_and_one_read_twice_is_one() -> None:
    first, last = Box((0, 0), (1, 6)), Box((3, 0), (1, 6))
    layout = kept_layout([W], plan_of(planned(W, last, first, last)))
    assert layout == (Part("w", first), Part("w", last))
    assert check_coverage([W], [layout]) is not None
    middle = kept_layout([W], plan_of(planned(W, Box((2, 0), (1, 6)), Box((1, 0), (1, 6)))))
    assert middle == (Part("w", Box((1, 0), (2, 6))),)
    assert check_coverage([W], [layout, middle]) is None
