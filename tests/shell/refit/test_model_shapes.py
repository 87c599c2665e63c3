"""Derived shapes against the modules that transformers builds from the same configuration."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
import transformers

from rollsync.pure.refit.fused_experts import fuse_experts
from rollsync.pure.refit.model_shapes import HuggingFaceConfig, model_tensors

SMALL = HuggingFaceConfig(
    model_type="llama",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)
MIXTURE = msgspec.structs.replace(SMALL, num_experts=4, moe_intermediate_size=16)
LATENT = msgspec.structs.replace(
    MIXTURE,
    num_key_value_heads=4,
    num_experts=None,
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)


def built(config: HuggingFaceConfig) -> torch.nn.Module:
    """The module without memory; further fields say how deepseek's experts are grouped, and that a
    small vocabulary has none of phi3's marks."""
    every: dict[str, object] = msgspec.json.decode(msgspec.json.encode(config))
    fields = {name: value for name, value in every.items() if value is not None}
    if config.model_type == "deepseek_v3":
        fields |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    if config.model_type == "phi3":
        fields |= {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    made_config = type(transformers.AutoConfig.for_model(config.model_type)).from_dict(fields)
    with torch.device("meta"):
        made: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(made_config)
    return made


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        msgspec.structs.replace(SMALL, attention_bias=True, mlp_bias=True, head_dim=16),
        msgspec.structs.replace(SMALL, model_type="mistral", head_dim=16),
        msgspec.structs.replace(SMALL, model_type="qwen2"),
        msgspec.structs.replace(SMALL, model_type="qwen2", tie_word_embeddings=True),
        msgspec.structs.replace(SMALL, model_type="qwen3", head_dim=16),
        msgspec.structs.replace(SMALL, model_type="phi3"),
    ],
)
def test_names_and_shapes_of_dense_models(config: HuggingFaceConfig) -> None:
    derived = {spec.name: spec.shape for spec in model_tensors(config).unwrap()}
    module = built(config)
    assert derived == {name: tuple(p.shape) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "config",
    [
        msgspec.structs.replace(MIXTURE, model_type="qwen3_moe", head_dim=16),
        msgspec.structs.replace(
            MIXTURE, model_type="qwen2_moe", shared_expert_intermediate_size=24
        ),
        msgspec.structs.replace(MIXTURE, model_type="mixtral", moe_intermediate_size=None),
        msgspec.structs.replace(LATENT, model_type="deepseek_v3"),
    ],
    ids=lambda config: config.model_type,
)
def test_elements_of_mixtures_of_experts(config: HuggingFaceConfig) -> None:
    """Modules hold a layer's experts in one tensor, checkpoints one by one: the sums agree, and so
    do the shapes of a checkpoint's experts once they are fused."""
    module = built(config)
    fused = {spec.name: spec.shape for spec in fuse_experts(model_tensors(config).unwrap())}
    held = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert fused == held
    elements = sum(p.numel() for p in module.parameters()) + sum(
        buffer.numel() for name, buffer in module.named_buffers() if "correction_bias" in name
    )
    assert elements == sum(math.prod(spec.shape) for spec in model_tensors(config).unwrap())
