"""Configurations that model publishers ship, with the sizes that they state.

The fields are those of each model's `config.json` that decide about shapes. Parameter counts are
the totals that the publishers' safetensors indexes add up to.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from rollsync.pure.refit.model_shapes import HuggingFaceConfig


class PublishedModel(Struct, frozen=True, kw_only=True):
    """A configuration, and what has to come out of it."""

    config: HuggingFaceConfig
    parameters: int
    tensors: int


LLAMA_3_1_70B: Final = PublishedModel(
    config=HuggingFaceConfig(
        model_type="llama",
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        torch_dtype="bfloat16",
    ),
    parameters=70_553_706_496,
    tensors=723,
)
QWEN3_235B_A22B: Final = PublishedModel(
    config=HuggingFaceConfig(
        model_type="qwen3_moe",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        moe_intermediate_size=1536,
        torch_dtype="bfloat16",
    ),
    parameters=235_093_634_560,
    tensors=36_945,
)
DEEPSEEK_V3: Final = PublishedModel(
    config=HuggingFaceConfig(
        model_type="deepseek_v3",
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        vocab_size=129280,
        n_routed_experts=256,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        torch_dtype="bfloat16",
    ),
    parameters=671_026_419_200,
    tensors=45_395,
)
MIXTRAL_8X7B: Final = PublishedModel(
    config=HuggingFaceConfig(
        model_type="mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        num_local_experts=8,
        torch_dtype="bfloat16",
    ),
    parameters=46_702_792_704,
    tensors=995,
)
QWEN2_5_0_5B: Final = PublishedModel(
    config=HuggingFaceConfig(
        model_type="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    ),
    parameters=494_032_768,
    tensors=290,
)
PUBLISHED: Final = {
    "Llama-3.1-70B": LLAMA_3_1_70B,
    "Qwen3-235B-A22B": QWEN3_235B_A22B,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "Qwen2.5-0.5B": QWEN2_5_0_5B,
}
