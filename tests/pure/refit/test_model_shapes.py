"""Shapes from a configuration, against what publishers state."""

from __future__ import annotations

import math

import msgspec
import pytest

from rollsync.pure.refit import TensorSpec, describe, plan_buckets
from rollsync.pure.refit.cuts import Attention
from rollsync.pure.refit.errors import BeyondPlanning, ConfigMalformed, UnknownArchitecture
from rollsync.pure.refit.model_shapes import (
    ARCHITECTURES,
    HuggingFaceConfig,
    attention_of,
    model_tensors,
)
from rollsync.pure.refit.plan_limits import MOST
from tests.pure.refit.published_models import (
    DEEPSEEK_V3,
    LLAMA_3_1_70B,
    PUBLISHED,
    QWEN2_5_0_5B,
    QWEN3_235B_A22B,
)


def tensors_of(config: HuggingFaceConfig) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in model_tensors(config).unwrap()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_tensors_are_as_many_as_published(name: str) -> None:
    model = PUBLISHED[name]
    specs = model_tensors(model.config).unwrap()
    assert sum(math.prod(spec.shape) for spec in specs) == model.parameters
    assert len(specs) == model.tensors
    plan_buckets(specs, 1 << 30).unwrap()


def test_tensors_of_a_dense_model() -> None:
    tensors = tensors_of(LLAMA_3_1_70B.config)
    layer = "model.layers.79"
    assert tensors[f"{layer}.self_attn.q_proj.weight"].shape == (8192, 8192)
    assert tensors[f"{layer}.self_attn.k_proj.weight"].shape == (1024, 8192)
    assert tensors[f"{layer}.mlp.down_proj.weight"].shape == (8192, 28672)
    assert tensors["lm_head.weight"].shape == (128256, 8192)
    assert tensors["model.embed_tokens.weight"].aliases == ()


def test_tensors_of_a_mixture_of_experts() -> None:
    tensors = tensors_of(QWEN3_235B_A22B.config)
    block = "model.layers.93.mlp"
    assert tensors[f"{block}.gate.weight"].shape == (128, 4096)
    assert tensors[f"{block}.experts.127.down_proj.weight"].shape == (4096, 1536)
    assert tensors["model.layers.0.self_attn.q_norm.weight"].shape == (128,)
    deepseek = tensors_of(DEEPSEEK_V3.config)
    assert "model.layers.2.mlp.gate_proj.weight" in deepseek
    assert "model.layers.3.mlp.gate_proj.weight" not in deepseek
    assert deepseek["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == "float32"
    assert deepseek["model.layers.3.mlp.shared_experts.up_proj.weight"].shape == (2048, 7168)
    assert deepseek["model.layers.3.self_attn.kv_b_proj.weight"].shape == (32768, 512)


def test_tied_weights_are_aliases() -> None:
    tensors = tensors_of(QWEN2_5_0_5B.config)
    assert tensors["model.embed_tokens.weight"].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in tensors
    assert tensors["model.layers.0.self_attn.q_proj.bias"].shape == (896,)
    assert "model.layers.0.self_attn.o_proj.bias" not in tensors


def test_layers_without_experts_where_the_configuration_says_so() -> None:
    config = msgspec.structs.replace(
        QWEN3_235B_A22B.config, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(1,)
    )
    with_experts = [
        index for index in range(4) if f"model.layers.{index}.mlp.gate.weight" in tensors_of(config)
    ]
    assert with_experts == [3]


def test_a_shared_expert_with_a_gate() -> None:
    config = HuggingFaceConfig(
        model_type="qwen2_moe",
        hidden_size=8,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        num_experts=2,
        moe_intermediate_size=4,
        shared_expert_intermediate_size=16,
    )
    tensors = tensors_of(config)
    block = "model.layers.0.mlp"
    assert tensors[f"{block}.shared_expert.gate_proj.weight"].shape == (16, 8)
    assert tensors[f"{block}.shared_expert_gate.weight"].shape == (1, 8)
    assert tensors[f"{block}.experts.1.up_proj.weight"].shape == (4, 8)


def test_biases_that_the_configuration_switches_on() -> None:
    config = msgspec.structs.replace(LLAMA_3_1_70B.config, attention_bias=True, mlp_bias=True)
    tensors = tensors_of(config)
    layer = "model.layers.0"
    assert tensors[f"{layer}.self_attn.o_proj.bias"].shape == (8192,)
    assert tensors[f"{layer}.self_attn.v_proj.bias"].shape == (1024,)
    assert tensors[f"{layer}.mlp.gate_proj.bias"].shape == (28672,)


def test_latent_attention_with_one_query_projection() -> None:
    config = msgspec.structs.replace(DEEPSEEK_V3.config, q_lora_rank=None, num_hidden_layers=1)
    tensors = tensors_of(config)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (128 * 192, 7168)
    assert not any("q_a" in name or "q_b" in name for name in tensors)


def test_what_the_tensors_do_not_tell_of_attention() -> None:
    assert attention_of(LLAMA_3_1_70B.config) == Attention(heads=64, kv_heads=8)
    assert attention_of(DEEPSEEK_V3.config) == Attention(heads=128)
    every_head = msgspec.structs.replace(LLAMA_3_1_70B.config, num_key_value_heads=None)
    assert attention_of(every_head) == Attention(heads=64, kv_heads=64)
    reordered = msgspec.structs.replace(LLAMA_3_1_70B.config, model_type="llama4_text")
    assert attention_of(reordered) == Attention(heads=64, kv_heads=8, reorders_rows=True)


@pytest.mark.parametrize(
    ("fields", "mentioned"),
    [
        ({"num_attention_heads": 8193}, ("hidden_size", "num_attention_heads", "head_dim")),
        ({"num_key_value_heads": 7}, ("num_key_value_heads", "num_attention_heads")),
        ({"num_key_value_heads": 65}, ("num_key_value_heads", "num_attention_heads")),
    ],
)
def test_heads_that_no_layer_has_are_refused(
    fields: dict[str, int], mentioned: tuple[str, ...]
) -> None:
    config = msgspec.structs.replace(LLAMA_3_1_70B.config, **fields)
    error = model_tensors(config).failure()
    assert isinstance(error, ConfigMalformed)
    assert all(each in error.why for each in mentioned)


def test_more_tensors_than_a_plan_is_made_for_are_not_made() -> None:
    config = msgspec.structs.replace(
        QWEN3_235B_A22B.config, num_hidden_layers=10_000, num_experts=100_000
    )
    error = model_tensors(config).failure()
    assert isinstance(error, BeyondPlanning)
    assert (error.what, error.most) == ("tensors", MOST["tensors"])
    assert error.size > 10_000 * 100_000 * 3


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    config = msgspec.structs.replace(LLAMA_3_1_70B.config, model_type="mamba")
    error = model_tensors(config).failure()
    assert error == UnknownArchitecture(model_type="mamba", known=tuple(ARCHITECTURES))
    assert "qwen3_moe" in describe(error)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ("Qwen3-235B-A22B", "num_experts"),
        ("DeepSeek-V3", "kv_lora_rank"),
        ("DeepSeek-V3", "v_head_dim"),
    ],
)
def test_a_field_that_the_type_needs_is_named(model: str, field: str) -> None:
    without = msgspec.structs.replace(PUBLISHED[model].config, **{field: None})
    error = model_tensors(without).failure()
    assert isinstance(error, ConfigMalformed)
    assert field in describe(error)


def test_a_dtype_that_torch_does_not_have_is_refused() -> None:
    config = msgspec.structs.replace(LLAMA_3_1_70B.config, torch_dtype="bf16")
    assert "'bf16'" in describe(model_tensors(config).failure())
    newer_name = msgspec.structs.replace(LLAMA_3_1_70B.config, dtype="float16", torch_dtype=None)
    assert {spec.dtype for spec in model_tensors(newer_name).unwrap()} == {"float16"}
