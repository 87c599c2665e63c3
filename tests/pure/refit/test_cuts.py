"""Fused tensors are cut so that the ranks of a group together keep each element once."""

from __future__ import annotations

from itertools import product

import pytest

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.cuts import Attention, Cut, cut_of, cutting_of, slices
from rollsync.pure.refit.errors import DimensionNotDivisible, TooFewExperts
from rollsync.pure.refit.layout import Box, check_coverage, plan_parts, slice_of, whole
from rollsync.pure.refit.parallel import Parallelism, experts_of, plan_shards
from tests.pure.refit.test_layout import elements_of

ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"


def fused_experts(experts: int, hidden: int, width: int, *, turned: bool) -> list[TensorSpec]:
    """Experts x outputs x inputs, or `turned`: experts x inputs x outputs."""
    into, out = (2 * width, hidden), (hidden, width)
    shapes = (into[::-1], out[::-1]) if turned else (into, out)
    return [
        TensorSpec(f"{EXPERTS}.gate_up_proj", (experts, *shapes[0]), "bfloat16"),
        TensorSpec(f"{EXPERTS}.down_proj", (experts, *shapes[1]), "bfloat16"),
    ]


def kept(
    specs: list[TensorSpec], parallelism: Parallelism, kv_heads: int | None = None
) -> list[dict[str, list[Box]]]:
    """By rank and source tensor, what a rank is sent."""
    shards = plan_shards(specs, parallelism, Attention(kv_heads=kv_heads)).unwrap()
    layouts = [shards.layouts[shard] for shard in shards.shard_of_rank]
    assert check_coverage(specs, layouts) is None
    ranks: list[dict[str, list[Box]]] = []
    for rank, layout in enumerate(layouts):
        own: dict[str, list[Box]] = {spec.name: [] for spec in specs}
        for part in plan_parts(specs, layout, rank=rank).unwrap():
            own[part.source].append(part.box)
        ranks.append(own)
    return ranks


def sliced(
    spec: TensorSpec, model: dict[str, TensorSpec], rank: int
) -> tuple[Box, ...] | DimensionNotDivisible:
    """What one of two ranks keeps."""
    return slices(spec, cutting_of(spec, model, Attention()), 2, rank)


def holders(ranks: list[dict[str, list[Box]]], spec: TensorSpec) -> set[int]:
    """On how many ranks the elements of a tensor are."""
    held = dict.fromkeys(elements_of(whole(spec)), 0)
    for own in ranks:
        for box in own[spec.name]:
            for element in elements_of(box):
                held[element] += 1
    return set(held.values())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_element_of_fused_experts_is_kept_by_one_rank(ranks: int, turned: bool) -> None:
    for experts, hidden, share in product(range(1, 6), (2, 3, 4), (1, 2)):
        specs = fused_experts(experts, hidden, ranks * share, turned=turned)
        sliced = Parallelism(rollout_world_size=ranks, tensor_parallel=ranks)
        whole_experts = Parallelism(
            rollout_world_size=ranks, tensor_parallel=ranks, expert_parallel=ranks
        )
        for parallelism in (sliced, whole_experts) if experts >= ranks else (sliced,):
            sent = kept(specs, parallelism)
            assert all(holders(sent, spec) == {1} for spec in specs)
        if experts < ranks:
            refused = plan_shards(specs, whole_experts, Attention()).failure()
            assert refused == TooFewExperts(experts=experts, expert_parallel=ranks)
            continue
        for rank, own in enumerate(kept(specs, whole_experts)):
            # Where there is one rank it slices, and keeps all.
            held = experts_of(rank, ranks, experts)
            assert own[specs[0].name] == [slice_of(specs[0], 0, held.start, len(held))]


@pytest.mark.parametrize("turned", [False, True])
def test_a_slice_of_fused_experts_has_a_part_of_each_half(turned: bool) -> None:
    specs = fused_experts(5, 6, 8, turned=turned)
    _, own = kept(specs, Parallelism(rollout_world_size=2, tensor_parallel=2))
    into, out = (2, 1) if turned else (1, 2)
    assert own[specs[0].name] == [
        slice_of(specs[0], into, 4, 4),
        slice_of(specs[0], into, 12, 4),
    ]
    assert own[specs[1].name] == [slice_of(specs[1], out, 4, 4)]


def test_experts_whose_way_around_cannot_be_told_are_kept_whole() -> None:
    into, out = fused_experts(2, 3, 4, turned=False)
    strange = TensorSpec(out.name, (2, 3, 5), "bfloat16")
    flat = TensorSpec(out.name, (2, 12), "bfloat16")
    for specs in ([into], [out], [into, strange], [into, flat]):
        for spec in specs:
            by_name = {each.name: each for each in specs}
            assert sliced(spec, by_name, 1) == (whole(spec),)


def test_biases_of_fused_experts_are_kept_with_their_experts() -> None:
    bias = TensorSpec(f"{EXPERTS}.gate_up_proj_bias", (4, 6), "bfloat16")
    sliced = Parallelism(rollout_world_size=2, tensor_parallel=2)
    assert [own[bias.name] for own in kept([bias], sliced)] == [[whole(bias)], [whole(bias)]]
    dealt = Parallelism(rollout_world_size=2, tensor_parallel=2, expert_parallel=2)
    assert [own[bias.name] for own in kept([bias], dealt)] == [
        [slice_of(bias, 0, 0, 2)],
        [slice_of(bias, 0, 2, 2)],
    ]


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_fused_heads_are_cut_as_apart_ones_are(ranks: int, kind: str) -> None:
    for kv_heads, group, head in product((1, 2, 3, 4, 6), (1, 2, 6), (1, 2)):
        queries = kv_heads * group
        if queries % ranks or max(ranks, kv_heads) % min(ranks, kv_heads):
            continue
        rows = {"q": queries * head, "k": kv_heads * head, "v": kv_heads * head}
        rest = (5,) if kind == "weight" else ()
        fused = TensorSpec(f"{ATTENTION}.qkv_proj.{kind}", (sum(rows.values()), *rest), "int8")
        output = TensorSpec(f"{ATTENTION}.o_proj.weight", (5, rows["q"]), "int8")
        apart = [
            TensorSpec(f"{ATTENTION}.{name}_proj.{kind}", (count, *rest), "int8")
            for name, count in rows.items()
        ]
        engine = Parallelism(rollout_world_size=ranks, tensor_parallel=ranks)
        together = kept([fused, output], engine, kv_heads)
        for one, other in zip(together, kept([*apart, output], engine, kv_heads), strict=True):
            first, expected = 0, set()
            for spec in apart:
                for box in other[spec.name]:
                    expected |= {(first + e[0], *e[1:]) for e in elements_of(box)}
                first += spec.shape[0]
            elements = [e for box in one[fused.name] for e in elements_of(box)]
            assert len(elements) == len(set(elements))
            assert set(elements) == expected
        repeats = max(1, ranks // kv_heads)
        assert holders(together, fused) == {1, repeats}


def test_fused_heads_without_their_output_are_kept_whole() -> None:
    fused = TensorSpec(f"{ATTENTION}.qkv_proj.weight", (8, 4), "int8")
    for columns in (0, 9, 5):
        # None; more than there are rows; and so many that key and value would differ.
        output = TensorSpec(f"{ATTENTION}.o_proj.weight", (4, columns), "int8")
        beside = [output] if columns else []
        by_name = {each.name: each for each in (fused, *beside)}
        assert sliced(fused, by_name, 0) == (whole(fused),)


def test_halves_and_heads_that_do_not_divide_are_refused() -> None:
    into, out = fused_experts(2, 5, 3, turned=False)
    odd = TensorSpec("model.layers.0.mlp.gate_up_proj.weight", (7, 2), "int8")
    fused = TensorSpec(f"{ATTENTION}.qkv_proj.weight", (10, 4), "int8")
    output = TensorSpec(f"{ATTENTION}.o_proj.weight", (4, 4), "int8")
    model = {each.name: each for each in (into, out, odd, fused, output)}
    assert sliced(into, model, 0) == DimensionNotDivisible(
        tensor=into.name, dimension=1, size=6, parts=4
    )
    assert sliced(odd, model, 0) == DimensionNotDivisible(
        tensor=odd.name, dimension=0, size=7, parts=4
    )
    assert sliced(fused, model, 0) == DimensionNotDivisible(
        tensor=fused.name, dimension=0, size=10, parts=2
    )


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", Cut.EXPERT_PAIRS),
        ("model.layers.0.feed_forward.experts.down_proj", Cut.EXPERT_INPUTS),
        ("model.layers.0.mlp.experts.down_proj_bias", None),
        ("model.layers.0.self_attn.qkv_proj.weight", Cut.HEADS),
        ("model.layers.0.mlp.gate_up_proj.weight", Cut.ROW_PAIRS),
        ("model.layers.0.mlp.experts.3.gate_up_proj.weight", Cut.ROW_PAIRS),
    ],
)
def test_the_name_of_a_fused_tensor_says_how_it_is_cut(name: str, cut: Cut | None) -> None:
    assert cut_of(name) is cut


@pytest.mark.parametrize(
    ("name", "is_whole"),
    [
        ("language_model.model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.k_proj.weight", True),
        ("model.layers.0.self_attn.v_proj.weight", False),
        ("model.layers.0.self_attn.k_proj.bias", False),
        ("vision_model.model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_weights_whose_rows_are_reordered_for_all_heads_are_kept_whole(
    name: str, is_whole: bool
) -> None:
    spec = TensorSpec(name, (8, 4), "int8")
    for attention in (Attention(kv_heads=2), Attention(kv_heads=2, reorders_rows=True)):
        kept_boxes = slices(spec, cutting_of(spec, {name: spec}, attention), 2, 1)
        cut = not (is_whole and attention.reorders_rows)
        assert kept_boxes == ((slice_of(spec, 0, 4, 4),) if cut else (whole(spec),))


def test_what_has_no_columns_is_kept_whole() -> None:
    scale = TensorSpec("model.layers.0.self_attn.o_proj.weight_scale", (8,), "float32")
    assert sliced(scale, {scale.name: scale}, 0) == (whole(scale),)
