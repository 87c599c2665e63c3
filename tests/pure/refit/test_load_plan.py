"""What a watched load says about the tensors that can do without the loader."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.load_plan import (
    Copy,
    Region,
    SeenParameter,
    SeenTensor,
    are_covered,
    covered_once,
    plan_load,
    region_of,
)

Q, K, OUT = (TensorSpec(name, (4, 4), "bfloat16") for name in ("q", "k", "o"))
FUSED = {
    "q": SeenTensor(Q, (Copy(Region(0, 32), "qk", Region(0, 32)),)),
    "k": SeenTensor(K, (Copy(Region(0, 32), "qk", Region(32, 32)),)),
    "o": SeenTensor(OUT, (Copy(Region(4, 4, 4, 8), "o", Region(0, 16)),)),
}
SERVING = {"qk": SeenParameter("attention", 64), "o": SeenParameter("output", 16)}


def bytes_in(region: Region) -> list[int]:
    return [byte for start, end in region.intervals() for byte in range(start, end)]


def bytes_of_view(offset: int, shape: list[int], strides: list[int], item: int) -> list[int]:
    """The bytes of a strided view, element by element."""
    return [
        (offset + sum(i * s for i, s in zip(index, strides, strict=True))) * item + byte
        for index in itertools.product(*map(range, shape))
        for byte in range(item)
    ]


views = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=4)


@given(st.integers(0, 5), views, st.sampled_from([1, 2, 4]))
def test_a_region_has_the_bytes_of_its_view_in_order(
    offset: int, dimensions: list[tuple[int, int]], item: int
) -> None:
    shape, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    region = region_of(offset, shape, strides, item)
    if region is not None:
        assert bytes_in(region) == bytes_of_view(offset, shape, strides, item)
        assert region.total_bytes == len(bytes_in(region))
        assert not region.total_bytes or region.end == max(bytes_in(region)) + 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_slice_of_a_matrix_is_a_region(
    rows: int, columns: int, item: int, data: st.DataObject
) -> None:
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    shape = [data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left))]
    assert region_of(top * columns + left, shape, [columns, 1], item) is not None


def test_what_is_no_region() -> None:
    assert region_of(0, (4, 3), (1, 4), 2) is None, "transposed"
    assert region_of(0, (4, 3), (0, 1), 2) is None, "expanded"
    assert region_of(0, (2, 2, 2), (100, 10, 1), 2) is None, "gaps in two dimensions"


@given(
    st.lists(
        st.builds(
            Region, st.integers(0, 8), st.integers(0, 4), st.integers(1, 3), st.integers(4, 6)
        ),
        max_size=5,
    ),
    st.integers(0, 12),
)
def test_covered_once_counts_every_byte(regions: list[Region], total: int) -> None:
    counted = sorted(byte for region in regions for byte in bytes_in(region))
    assert covered_once(regions, total) == (counted == list(range(total)))
    for first in range(total + 1):
        has_all = set(counted) >= set(range(first, total))
        assert are_covered(regions, first, total - first) == has_all


def test_plain_copies_are_direct() -> None:
    plan = plan_load(FUSED, SERVING)
    assert set(plan.direct) == {"q", "k", "o"}
    assert plan.layers == {"attention", "output"}
    assert plan.direct_bytes == 64 + 16
    assert plan.tensors["o"].copies == FUSED["o"].copies


def test_a_tensor_with_a_problem_takes_its_layer_with_it() -> None:
    plan = plan_load({**FUSED, "k": SeenTensor(K, FUSED["k"].copies, "it is scaled")}, SERVING)
    assert plan.layers == {"output"}
    assert set(plan.direct) == {"o"}
    assert plan.tensors["k"].staged_because == "it is scaled"
    assert "it is scaled" in plan.tensors["q"].staged_because


def test_a_gap_in_a_parameter_stages_its_layer_and_padding_does_not() -> None:
    gap = {**SERVING, "qk": SeenParameter("attention", 72)}
    assert set(plan_load(FUSED, gap).direct) == {"o"}
    padded = {**SERVING, "qk": SeenParameter("attention", 72, zeros=(Region(64, 8),))}
    assert set(plan_load(FUSED, padded).direct) == {"q", "k", "o"}
    twice = {**SERVING, "qk": SeenParameter("attention", 64, zeros=(Region(60, 4),))}
    assert set(plan_load(FUSED, twice).direct) == {"o"}


def test_a_processed_parameter_stages_its_layer() -> None:
    processed = {**SERVING, "o": SeenParameter("output", 16, problem="it is packed")}
    plan = plan_load(FUSED, processed)
    assert set(plan.direct) == {"q", "k"}
    assert "it is packed" in plan.tensors["o"].staged_because


def test_one_tensor_in_two_layers_ties_their_fates() -> None:
    tied = {
        **FUSED,
        "o": SeenTensor(OUT, (*FUSED["o"].copies, Copy(Region(0, 2), "s", Region(0, 2)))),
    }
    serving = {**SERVING, "s": SeenParameter("scale", 4), "t": SeenParameter("scale", 2)}
    plan = plan_load(tied, serving)
    assert plan.layers == {"attention"}
    assert set(plan.direct) == {"q", "k"}


def test_more_than_a_tensor_has_is_a_problem() -> None:
    wrong = (Copy(Region(0, 33), "qk", Region(0, 33)),)
    plan = plan_load({"q": SeenTensor(Q, wrong)}, SERVING)
    assert plan.tensors["q"].staged_because == "more is copied of it than it has"
    uneven = (Copy(Region(0, 16), "qk", Region(0, 32)),)
    assert not plan_load({"q": SeenTensor(Q, uneven)}, SERVING).direct
    nowhere = (Copy(Region(0, 32), "x", Region(0, 32)),)
    assert not plan_load({"q": SeenTensor(Q, nowhere)}, SERVING).direct


def test_a_tensor_that_the_rank_does_not_keep_is_direct_and_needs_nothing() -> None:
    plan = plan_load({"elsewhere": SeenTensor(Q)}, {})
    assert plan.tensors["elsewhere"].is_direct
    assert plan.tensors["elsewhere"].copies == ()
    assert plan.direct_bytes == 0


@st.composite
def loads(draw: st.DrawFn) -> tuple[dict[str, SeenTensor], dict[str, SeenParameter]]:
    """Tensors of four bytes, each copied whole to up to two parameters of up to three layers."""
    names = [f"p{i}" for i in range(draw(st.integers(1, 5)))]
    filled = dict.fromkeys(names, 0)
    tensors: dict[str, SeenTensor] = {}
    for index in range(draw(st.integers(0, 6))):
        copies = []
        for name in draw(st.lists(st.sampled_from(names), max_size=2)):
            copies.append(Copy(Region(0, 4), name, Region(filled[name], 4)))
            filled[name] += 4
        problem = draw(st.sampled_from(["", "", "", "odd"]))
        spec = TensorSpec(f"t{index}", (4,), "uint8")
        tensors[spec.name] = SeenTensor(spec, tuple(copies), problem)
    parameters = {
        name: SeenParameter(
            draw(st.sampled_from("abc")),
            size + draw(st.sampled_from([0, 0, 0, 4])),
            problem=draw(st.sampled_from(["", "", "", "packed"])),
        )
        for name, size in filled.items()
    }
    return tensors, parameters


@given(loads())
def test_layers_are_direct_or_staged_as_wholes(
    load: tuple[dict[str, SeenTensor], dict[str, SeenParameter]],
) -> None:
    tensors, parameters = load
    plan = plan_load(tensors, parameters)
    assert list(plan.tensors) == list(tensors)
    for name, each in tensors.items():
        layers = {parameters[copy.parameter].layer for copy in each.copies}
        assert plan.tensors[name].is_direct == (not each.problem and layers <= plan.layers)
        if not plan.tensors[name].is_direct:
            assert plan.layers.isdisjoint(layers)
    for name, parameter in parameters.items():
        regions = [c.target for t in tensors.values() for c in t.copies if c.parameter == name]
        if parameter.layer in plan.layers and regions:
            assert not parameter.problem
            assert covered_once(regions, parameter.total_bytes)
