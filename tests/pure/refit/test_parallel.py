"""Layouts of tensor, pipeline and expert parallel engines partition every model."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import pytest
from returns.pipeline import is_successful

from rollsync.pure.refit import TensorSpec, describe
from rollsync.pure.refit.cuts import Attention, Cut, cut_of
from rollsync.pure.refit.errors import (
    BeyondPlanning,
    DimensionNotDivisible,
    ExpertGroupsUneven,
    HeadsNotDivisible,
    SizeNotPositive,
    TooFewExperts,
    TooFewLayers,
    WorldNotDivisible,
)
from rollsync.pure.refit.layout import Box, Part, check_coverage, plan_parts
from rollsync.pure.refit.model_shapes import HuggingFaceConfig, attention_of, model_tensors
from rollsync.pure.refit.parallel import (
    Parallelism,
    Shards,
    experts_of,
    place_of,
    plan_shards,
    stage_of_layers,
)
from tests.pure.refit.published_models import LLAMA_3_1_70B, QWEN3_235B_A22B

DENSE = HuggingFaceConfig(
    model_type="qwen2",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=7,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=100,
)
TIED = msgspec.structs.replace(DENSE, tie_word_embeddings=True)
EXPERTS = msgspec.structs.replace(
    DENSE, model_type="qwen3_moe", num_experts=6, moe_intermediate_size=8
)


def shards_of(config: HuggingFaceConfig, parallelism: Parallelism) -> Shards:
    specs = model_tensors(config).unwrap()
    return plan_shards(specs, parallelism, attention_of(config)).unwrap()


def parts_by_name(layout: tuple[Part, ...]) -> dict[str, Box]:
    assert len({part.name for part in layout}) == len(layout)
    return {part.name: part.box for part in layout}


@pytest.mark.parametrize("config", [DENSE, TIED, EXPERTS], ids=["dense", "tied", "experts"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "groups"), list(product([1, 2, 4], [1, 2, 3, 5], [1, 2, 3]))
)
def test_every_layout_is_a_partition(
    config: HuggingFaceConfig, tensor: int, pipeline: int, groups: int
) -> None:
    specs = model_tensors(config).unwrap()
    engine = tensor * pipeline
    world = engine * groups
    for expert in {1, tensor, tensor * groups}:
        parallelism = Parallelism(
            rollout_world_size=world,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            expert_parallel=expert,
        )
        experts = config.num_experts or 0
        if expert > max(1, experts):
            refused = plan_shards(specs, parallelism, attention_of(config)).failure()
            assert refused == TooFewExperts(experts=experts, expert_parallel=expert)
            continue
        shards = shards_of(config, parallelism)
        assert len(shards.shard_of_rank) == world
        assert set(shards.shard_of_rank) == set(range(len(shards.layouts)))
        # The ranks that share all experts: one engine, or all of them.
        sharing = world if expert == tensor * groups else engine
        for first in range(0, world, sharing):
            layouts = [shards.layouts[s] for s in shards.shard_of_rank[first : first + sharing]]
            assert check_coverage(specs, layouts) is None
        for rank, shard in enumerate(shards.shard_of_rank):
            plan_parts(specs, shards.layouts[shard], rank=rank).unwrap()


def test_no_byte_of_a_cut_tensor_is_kept_by_two_ranks_of_a_group() -> None:
    config = msgspec.structs.replace(DENSE, num_key_value_heads=8)
    specs = {spec.name: spec for spec in model_tensors(config).unwrap()}
    shards = shards_of(config, Parallelism(rollout_world_size=4, tensor_parallel=4))
    held = dict.fromkeys(specs, 0)
    for layout in shards.layouts:
        for part in layout:
            held[part.name] += part.box.elements
    for name, spec in specs.items():
        copies = 1 if cut_of(name) else 4
        assert held[name] == copies * math.prod(spec.shape), name


def test_fewer_key_and_value_heads_than_ranks_are_repeated() -> None:
    shards = shards_of(DENSE, Parallelism(rollout_world_size=4, tensor_parallel=4))
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = [(parts_by_name(shards.layouts[s])[name].starts[0]) for s in shards.shard_of_rank]
    assert rows == [0, 0, 2, 2]
    assert {parts_by_name(layout)[name].sizes for layout in shards.layouts} == {(2, 16)}


def test_the_vocabulary_is_cut_with_its_padding_and_sent_without() -> None:
    shards = shards_of(DENSE, Parallelism(rollout_world_size=2, tensor_parallel=2))
    boxes = [parts_by_name(layout)["lm_head.weight"] for layout in shards.layouts]
    assert boxes == [Box((0, 0), (64, 16)), Box((64, 0), (36, 16))]
    tiny = msgspec.structs.replace(DENSE, vocab_size=10)
    shards = shards_of(tiny, Parallelism(rollout_world_size=4, tensor_parallel=4))
    assert ["lm_head.weight" in parts_by_name(layout) for layout in shards.layouts] == [
        True,
        False,
        False,
        False,
    ]


def test_two_projections_in_one_tensor_are_cut_each() -> None:
    spec = TensorSpec("model.layers.0.mlp.gate_up_proj.weight", (24, 5), "bfloat16")
    layouts = (
        plan_shards([spec], Parallelism(rollout_world_size=3, tensor_parallel=3), Attention())
        .unwrap()
        .layouts
    )
    assert layouts[1] == (
        Part(spec.name, Box((4, 0), (4, 5))),
        Part(spec.name, Box((16, 0), (4, 5))),
    )
    assert check_coverage([spec], layouts) is None
    kept = [plan_parts([spec], layout, rank=0).unwrap() for layout in layouts]
    assert sum(part.box.elements for parts in kept for part in parts) == 24 * 5
    refused = plan_shards([spec], Parallelism(rollout_world_size=5, tensor_parallel=5), Attention())
    assert refused.failure() == DimensionNotDivisible(
        tensor=spec.name, dimension=0, size=24, parts=10
    )


def test_stages_keep_their_layers_and_what_surrounds_them() -> None:
    shards = shards_of(TIED, Parallelism(rollout_world_size=3, pipeline_parallel=3))
    names = [set(parts_by_name(layout)) for layout in shards.layouts]
    assert "model.embed_tokens.weight" in names[0]
    assert "lm_head.weight" not in names[0]
    assert "model.embed_tokens.weight" not in names[2]
    assert {"lm_head.weight", "model.norm.weight"} <= names[2]
    assert [
        sum(f"model.layers.{layer}.input_layernorm.weight" in own for layer in range(7))
        for own in names
    ] == [2, 3, 2]


def test_tied_weights_of_one_stage_are_kept_under_both_names() -> None:
    (layout,) = shards_of(TIED, Parallelism(rollout_world_size=1)).layouts
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(parts_by_name(layout))


def test_expert_parallel_ranks_keep_whole_experts() -> None:
    parallelism = Parallelism(rollout_world_size=4, tensor_parallel=2, expert_parallel=4)
    shards = shards_of(EXPERTS, parallelism)
    own = []
    for shard in shards.shard_of_rank:
        boxes = parts_by_name(shards.layouts[shard])
        gates = [f"model.layers.3.mlp.experts.{e}.gate_proj.weight" for e in range(6)]
        own.append([e for e, gate in enumerate(gates) if gate in boxes])
        assert all(boxes[gate].sizes == (8, 16) for gate in gates if gate in boxes)
        assert boxes["model.layers.3.self_attn.q_proj.weight"].sizes == (8, 16)
    assert own == [[0, 1], [2, 3], [4], [5]]


def test_without_expert_parallelism_ranks_keep_slices_of_all_experts() -> None:
    shards = shards_of(EXPERTS, Parallelism(rollout_world_size=2, tensor_parallel=2))
    boxes = parts_by_name(shards.layouts[1])
    assert boxes["model.layers.0.mlp.experts.5.up_proj.weight"] == Box((4, 0), (4, 16))
    assert boxes["model.layers.0.mlp.experts.5.down_proj.weight"] == Box((0, 4), (16, 4))
    assert boxes["model.layers.0.mlp.gate.weight"] == Box((0, 0), (6, 16))


def test_ranks_count_groups_then_stages_then_tensor_ranks() -> None:
    parallelism = Parallelism(
        rollout_world_size=8, tensor_parallel=2, pipeline_parallel=2, expert_parallel=4
    )
    assert [place_of(rank, parallelism) for rank in range(8)] == [
        (0, 0, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 1, 1),
        (0, 0, 2),
        (0, 1, 3),
        (1, 0, 2),
        (1, 1, 3),
    ]


@pytest.mark.parametrize(("layers", "stages"), list(product(range(1, 13), range(1, 7))))
def test_layers_are_dealt_evenly_in_order(layers: int, stages: int) -> None:
    stage_of = stage_of_layers(layers, stages)
    assert len(stage_of) == layers
    assert list(stage_of) == sorted(stage_of)
    counts = [stage_of.count(stage) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("experts", "ranks"), list(product(range(1, 13), range(1, 7))))
def test_experts_are_dealt_evenly_in_order(experts: int, ranks: int) -> None:
    dealt = [expert for rank in range(ranks) for expert in experts_of(rank, ranks, experts)]
    assert dealt == list(range(experts))


def test_published_models_divide_as_their_engines_run_them() -> None:
    dense = shards_of(LLAMA_3_1_70B.config, Parallelism(rollout_world_size=16, tensor_parallel=8))
    assert len(dense.layouts) == 8
    assert dense.shard_of_rank == tuple(range(8)) * 2
    share = sum(part.box.elements for part in dense.layouts[0])
    assert LLAMA_3_1_70B.parameters / 8 < share < LLAMA_3_1_70B.parameters / 8 * 1.001
    experts = shards_of(
        QWEN3_235B_A22B.config,
        Parallelism(rollout_world_size=16, tensor_parallel=8, expert_parallel=16),
    )
    assert len(experts.layouts) == 16


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("model.layers.0.self_attn.o_proj.weight", Cut.COLUMNS),
        ("model.layers.0.self_attn.o_proj.bias", None),
        ("model.layers.0.self_attn.q_proj.bias", Cut.ROWS),
        ("model.layers.0.mlp.gate.weight", None),
        ("model.layers.0.input_layernorm.weight", None),
        ("model.embed_tokens.weight", Cut.VOCABULARY),
        ("weight", None),
    ],
)
def test_the_name_of_a_tensor_says_how_it_is_cut(name: str, cut: Cut | None) -> None:
    assert cut_of(name) is cut


@pytest.mark.parametrize(
    ("parallelism", "error"),
    [
        (
            Parallelism(rollout_world_size=0),
            SizeNotPositive(what="rollout world size", size=0),
        ),
        (
            Parallelism(rollout_world_size=2, tensor_parallel=-1),
            SizeNotPositive(what="tensor-parallel size", size=-1),
        ),
        (
            Parallelism(rollout_world_size=6, tensor_parallel=4),
            WorldNotDivisible(rollout_world_size=6, tensor_parallel=4, pipeline_parallel=1),
        ),
        (
            Parallelism(rollout_world_size=4, tensor_parallel=2, expert_parallel=3),
            ExpertGroupsUneven(expert_parallel=3, tensor_parallel=2, stage_ranks=4),
        ),
        (
            Parallelism(rollout_world_size=6, tensor_parallel=2, expert_parallel=4),
            ExpertGroupsUneven(expert_parallel=4, tensor_parallel=2, stage_ranks=6),
        ),
        (
            Parallelism(rollout_world_size=8, pipeline_parallel=8),
            TooFewLayers(layers=7, pipeline_parallel=8),
        ),
        (
            Parallelism(rollout_world_size=5, tensor_parallel=5),
            DimensionNotDivisible(
                tensor="model.embed_tokens.weight", dimension=0, size=128, parts=5
            ),
        ),
        (
            Parallelism(rollout_world_size=16, tensor_parallel=16),
            DimensionNotDivisible(
                tensor="model.layers.0.mlp.gate_proj.weight", dimension=0, size=24, parts=16
            ),
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(parallelism: Parallelism, error: object) -> None:
    specs = model_tensors(DENSE).unwrap()
    refusal = plan_shards(specs, parallelism, Attention(kv_heads=2)).failure()
    assert refusal == error
    assert describe(refusal)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "fits"),
    [
        (8, 2, 2, True),
        (8, 2, 4, True),
        (8, 2, 3, False),
        (12, 4, 6, False),
        (12, 3, 6, True),
        (8, None, 8, True),
        (8, None, 16, False),
        (None, None, 16, True),
    ],
)
def test_ranks_have_whole_heads(
    heads: int | None, kv_heads: int | None, tensor: int, fits: bool
) -> None:
    specs = [TensorSpec("model.layers.0.self_attn.q_proj.weight", (96 * 16, 4), "int8")]
    parallelism = Parallelism(rollout_world_size=tensor, tensor_parallel=tensor)
    attention = Attention(heads=heads, kv_heads=kv_heads)
    result = plan_shards(specs, parallelism, attention)
    assert is_successful(result) == fits
    if not fits:
        assert heads is not None
        assert result.failure() == HeadsNotDivisible(
            heads=heads, kv_heads=kv_heads or heads, tensor_parallel=tensor
        )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layers.10000.up_proj.weight", "layers"),
        (f"layers.{'9' * 5000}.up_proj.weight", "layers"),
        ("layers.0.experts.100000.w1.weight", "experts"),
    ],
)
def test_numbers_in_names_that_no_model_has(name: str, what: str) -> None:
    spec = TensorSpec(name, (4, 4), "int8")
    error = plan_shards([spec], Parallelism(rollout_world_size=1), Attention()).failure()
    assert isinstance(error, BeyondPlanning)
    assert error.what == what
    padded = TensorSpec("layers.00000000000000000001.up_proj.weight", (4, 4), "int8")
    plan_shards([padded], Parallelism(rollout_world_size=1), Attention()).unwrap()


def test_key_and_value_heads_that_cannot_be_repeated_evenly() -> None:
    specs = [TensorSpec("model.layers.0.self_attn.k_proj.weight", (12, 4), "int8")]
    parallelism = Parallelism(rollout_world_size=4, tensor_parallel=4)
    assert plan_shards(
        specs, parallelism, Attention(kv_heads=3)
    ).failure() == DimensionNotDivisible(tensor=specs[0].name, dimension=0, size=3, parts=4)
