"""The experts of a checkpoint become the two tensors that a trainer's module has."""

from __future__ import annotations

import math

import msgspec
import pytest

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.fused_experts import fuse_experts
from rollsync.pure.refit.kept import kept_bytes
from rollsync.pure.refit.model_shapes import attention_of, model_tensors
from rollsync.pure.refit.parallel import Parallelism, plan_shards
from tests.pure.refit.published_models import (
    DEEPSEEK_V3,
    LLAMA_3_1_70B,
    QWEN3_235B_A22B,
    PublishedModel,
)


@pytest.mark.parametrize("model", [QWEN3_235B_A22B, DEEPSEEK_V3], ids=["qwen3", "deepseek"])
def test_no_element_is_lost_and_a_rank_keeps_as_many_bytes(model: PublishedModel) -> None:
    config = model.config
    specs = model_tensors(config).unwrap()
    fused = fuse_experts(specs)
    assert sum(math.prod(s.shape) for s in fused) == sum(math.prod(s.shape) for s in specs)
    for expert in (1, 2):
        engine = Parallelism(rollout_world_size=2, tensor_parallel=2, expert_parallel=expert)
        kept = [
            [
                kept_bytes(each, layout)
                for layout in plan_shards(each, engine, attention_of(config)).unwrap().layouts
            ]
            for each in (specs, fused)
        ]
        assert kept[0] == kept[1]
        assert max(kept[0]) < 0.51 * sum(spec.tensor_bytes for spec in specs)


def test_experts_are_one_tensor_where_the_first_of_them_was() -> None:
    config = msgspec.structs.replace(
        QWEN3_235B_A22B.config, num_hidden_layers=1, num_experts=3, tie_word_embeddings=True
    )
    names = [spec.name.removeprefix("model.layers.0.") for spec in model_tensors(config).unwrap()]
    fused = fuse_experts(model_tensors(config).unwrap())
    first = names.index("mlp.experts.0.gate_proj.weight")
    assert [spec.name.removeprefix("model.layers.0.") for spec in fused] == [
        *names[:first],
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        *names[first + 9 :],
    ]
    assert fused[first].shape == (3, 3072, 4096)
    assert fused[first + 1].shape == (3, 4096, 1536)
    assert fused[0].aliases == ("lm_head.weight",)


def test_blocks_of_another_name_are_those_of_the_module() -> None:
    block = "model.layers.0.block_sparse_moe"
    specs = [
        TensorSpec(f"{block}.gate.weight", (2, 4), "bfloat16"),
        *(
            TensorSpec(f"{block}.experts.{e}.{w}.weight", shape, "bfloat16")
            for e in range(2)
            for w, shape in (("w1", (3, 4)), ("w2", (4, 3)), ("w3", (3, 4)))
        ),
    ]
    assert fuse_experts(specs) == (
        TensorSpec("model.layers.0.mlp.gate.weight", (2, 4), "bfloat16"),
        TensorSpec("model.layers.0.mlp.experts.gate_up_proj", (2, 6, 4), "bfloat16"),
        TensorSpec("model.layers.0.mlp.experts.down_proj", (2, 4, 3), "bfloat16"),
    )


def test_a_dense_model_stays_as_it_is() -> None:
    specs = model_tensors(LLAMA_3_1_70B.config).unwrap()
    assert fuse_experts(specs) == specs


def test_experts_that_are_not_all_there_or_alike_stay_apart() -> None:
    def expert(number: int, width: int = 3, *, without: str = "") -> list[TensorSpec]:
        shapes = {"gate_proj": (width, 4), "up_proj": (width, 4), "down_proj": (4, width)}
        return [
            TensorSpec(f"mlp.experts.{number}.{name}.weight", shape, "int8")
            for name, shape in shapes.items()
            if name != without
        ]

    assert len(fuse_experts([*expert(0), *expert(1)])) == 2
    for specs in (
        [*expert(0), *expert(2)],
        [*expert(0), *expert(1, 5)],
        [*expert(0), *expert(1, without="up_proj")],
        expert(0, without="down_proj"),
        [
            TensorSpec(f"mlp.experts.0.{n}_proj.weight", (3,), "int8")
            for n in ("gate", "up", "down")
        ],
    ):
        assert fuse_experts(specs) == tuple(specs)
