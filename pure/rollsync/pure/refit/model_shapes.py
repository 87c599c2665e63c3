"""The tensors of a published model, from its Hugging Face configuration alone.

Names and shapes are those of the model's checkpoint files, in the order of the modules. One
function per part of a decoder layer; the table `ARCHITECTURES` says which parts a model type has.

Rule kept here: a model type that is not in the table has no shapes; none is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta, Struct
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.cuts import Attention
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.errors import ConfigMalformed, ShapesError, UnknownArchitecture
from rollsync.pure.refit.plan_limits import beyond

Size = Annotated[int, Meta(ge=1, le=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Layers = Annotated[int, Meta(ge=1, le=10_000)]
Experts = Annotated[int, Meta(ge=1, le=100_000)]


class HuggingFaceConfig(Struct, frozen=True, kw_only=True):
    """The fields of a `config.json` that decide about shapes, under their own names.

    A field is None (or its default) when the file leaves it out; files have many further fields.
    """

    model_type: str
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    # Mixtures of experts
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    n_routed_experts: Experts | None = None
    n_shared_experts: Count | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    decoder_sparse_step: Size = 1
    mlp_only_layers: tuple[Count, ...] | None = None
    first_k_dense_replace: Count = 0
    # Multi-head latent attention
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None


class Architecture(Struct, frozen=True, kw_only=True):
    """Which parts the decoder layers of a model type have.

    Attributes:
        experts: Names of a layer's expert block, and None for a dense model.
        latent_attention: Multi-head latent attention instead of grouped queries.
        query_bias: Query, key and value have a bias whatever `attention_bias` says.
        head_norms: Query and key heads are normalised.
        fused: Query, key and value are one tensor, and so are gate and up.
    """

    experts: ExpertNames | None = None
    latent_attention: bool = False
    query_bias: bool = False
    head_norms: bool = False
    fused: bool = False


class ExpertNames(Struct, frozen=True, kw_only=True):
    """How a checkpoint names an expert block, and the projections of one expert."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""
    """The experts that every token goes through, where there are any."""
    shared_gate: bool = False
    correction_bias: bool = False


ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "deepseek_v3": Architecture(
            experts=ExpertNames(shared="shared_experts", correction_bias=True),
            latent_attention=True,
        ),
        "kimi_k2": Architecture(
            experts=ExpertNames(shared="shared_experts", correction_bias=True),
            latent_attention=True,
        ),
        "llama": Architecture(),
        "mistral": Architecture(),
        "mixtral": Architecture(
            experts=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
        ),
        "phi3": Architecture(fused=True),
        "qwen2": Architecture(query_bias=True),
        "qwen2_moe": Architecture(
            experts=ExpertNames(shared="shared_expert", shared_gate=True), query_bias=True
        ),
        "qwen3": Architecture(head_norms=True),
        "qwen3_moe": Architecture(experts=ExpertNames(), head_norms=True),
    }
)
"""By `model_type`."""

_REORDERS_ROWS: Final = frozenset({"llama4", "llama4_text"})
"""Model types whose loader reorders the rows of query and key weights (read in vLLM 0.32)."""
_MOST_OF_A_DENSE_LAYER: Final = 18
_TENSORS_OF_AN_EXPERT: Final = 3

_Named = list[tuple[str, tuple[int, ...]]]
"""Tensors of one block of a layer: names inside the block, and shapes."""


def model_tensors(config: HuggingFaceConfig) -> Result[tuple[TensorSpec, ...], ShapesError]:
    """Every tensor of the model's checkpoint in module order; tied weights as aliases."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        return Failure(
            UnknownArchitecture(model_type=config.model_type, known=tuple(ARCHITECTURES))
        )
    dtype = config.dtype or config.torch_dtype or "bfloat16"
    if dtype not in DTYPE_BYTES:
        return Failure(ConfigMalformed(why=f"its dtype {dtype!r} is no torch dtype"))
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    vocabulary = (config.vocab_size, config.hidden_size)
    attention = (
        _latent_attention(config)
        if architecture.latent_attention
        else _grouped_attention(config, architecture)
    )
    sparse = _layers_with_experts(config, architecture)
    too_many = beyond(
        "tensors",
        config.num_hidden_layers * _MOST_OF_A_DENSE_LAYER
        + len(sparse) * (_expert_count(config) or 0) * _TENSORS_OF_AN_EXPERT,
    )
    if too_many is not None:
        return Failure(too_many)
    experts = [] if architecture.experts is None else _experts(config, architecture.experts)
    if isinstance(attention, ConfigMalformed):
        return Failure(attention)
    if isinstance(experts, ConfigMalformed):
        return Failure(experts)
    layers = [
        TensorSpec(name, shape, "float32" if name.endswith("correction_bias") else dtype)
        for index in range(config.num_hidden_layers)
        for name, shape in _layer(
            config, architecture, index, attention, experts if index in sparse else None
        )
    ]
    specs = [
        TensorSpec("model.embed_tokens.weight", vocabulary, dtype, tied),
        *layers,
        TensorSpec("model.norm.weight", (config.hidden_size,), dtype),
    ]
    if not tied:
        specs.append(TensorSpec("lm_head.weight", vocabulary, dtype))
    return Success(tuple(specs))


def attention_of(config: HuggingFaceConfig) -> Attention:
    """What the tensors do not tell of the model's attention."""
    architecture = ARCHITECTURES.get(config.model_type)
    is_latent = architecture is not None and architecture.latent_attention
    return Attention(
        heads=config.num_attention_heads,
        # Latent attention has no heads to share.
        kv_heads=None if is_latent else config.num_key_value_heads or config.num_attention_heads,
        reorders_rows=config.model_type in _REORDERS_ROWS,
    )


def _layer(
    config: HuggingFaceConfig,
    architecture: Architecture,
    index: int,
    attention: _Named,
    experts: _Named | None,
) -> _Named:
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    block, feed_forward = "mlp", experts
    if feed_forward is None:
        feed_forward = _dense(config, architecture)
    elif architecture.experts is not None:
        block = architecture.experts.block
    return [
        (f"{prefix}.input_layernorm.weight", (hidden,)),
        (f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        *((f"{prefix}.self_attn.{name}", shape) for name, shape in attention),
        *((f"{prefix}.{block}.{name}", shape) for name, shape in feed_forward),
    ]


def _grouped_attention(
    config: HuggingFaceConfig, architecture: Architecture
) -> _Named | ConfigMalformed:
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or hidden // heads
    if not head_dim:
        why = f"hidden_size {hidden} is less than num_attention_heads {heads}, without a head_dim"
        return ConfigMalformed(why=why)
    if heads % kv_heads:
        why = f"num_key_value_heads {kv_heads} do not divide num_attention_heads {heads}"
        return ConfigMalformed(why=why)
    kv_rows = kv_heads * head_dim
    bias = config.attention_bias or architecture.query_bias
    if architecture.fused:
        tensors = _projection("qkv_proj", heads * head_dim + 2 * kv_rows, hidden, bias=bias)
    else:
        tensors = [
            *_projection("q_proj", heads * head_dim, hidden, bias=bias),
            *_projection("k_proj", kv_rows, hidden, bias=bias),
            *_projection("v_proj", kv_rows, hidden, bias=bias),
        ]
    tensors += _projection("o_proj", hidden, heads * head_dim, bias=config.attention_bias)
    if architecture.head_norms:
        tensors += [("q_norm.weight", (head_dim,)), ("k_norm.weight", (head_dim,))]
    return tensors


def _latent_attention(config: HuggingFaceConfig) -> _Named | ConfigMalformed:
    hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
    kv_rank, value = config.kv_lora_rank, config.v_head_dim
    plain, rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
    if kv_rank is None or value is None or plain is None or rotary is None:
        needed = "kv_lora_rank, v_head_dim, qk_nope_head_dim and qk_rope_head_dim"
        return ConfigMalformed(why=f"model type {config.model_type!r} needs {needed}")
    query_rows, query_rank = heads * (plain + rotary), config.q_lora_rank
    if query_rank is None:
        query: _Named = [("q_proj.weight", (query_rows, hidden))]
    else:
        query = [
            *_projection("q_a_proj", query_rank, hidden, bias=bias),
            ("q_a_layernorm.weight", (query_rank,)),
            ("q_b_proj.weight", (query_rows, query_rank)),
        ]
    return [
        *query,
        *_projection("kv_a_proj_with_mqa", kv_rank + rotary, hidden, bias=bias),
        ("kv_a_layernorm.weight", (kv_rank,)),
        ("kv_b_proj.weight", (heads * (plain + value), kv_rank)),
        *_projection("o_proj", hidden, heads * value, bias=bias),
    ]


def _dense(config: HuggingFaceConfig, architecture: Architecture) -> _Named:
    hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    if architecture.fused:
        into = _projection("gate_up_proj", 2 * width, hidden, bias=bias)
    else:
        into = [
            *_projection("gate_proj", width, hidden, bias=bias),
            *_projection("up_proj", width, hidden, bias=bias),
        ]
    return [
        *into,
        *_projection("down_proj", hidden, width, bias=bias),
    ]


def _layers_with_experts(config: HuggingFaceConfig, architecture: Architecture) -> frozenset[int]:
    if architecture.experts is None:
        return frozenset()
    step = config.decoder_sparse_step
    candidates = range(step - 1, config.num_hidden_layers, step)
    sparse = {layer for layer in candidates if layer >= config.first_k_dense_replace}
    return frozenset(sparse.difference(config.mlp_only_layers or ()))


def _expert_count(config: HuggingFaceConfig) -> int | None:
    return config.num_experts or config.num_local_experts or config.n_routed_experts


def _experts(config: HuggingFaceConfig, names: ExpertNames) -> _Named | ConfigMalformed:
    hidden = config.hidden_size
    count = _expert_count(config)
    if count is None:
        needed = "num_experts, num_local_experts or n_routed_experts"
        return ConfigMalformed(why=f"model type {config.model_type!r} needs {needed}")
    width = config.moe_intermediate_size or config.intermediate_size
    tensors: _Named = [("gate.weight", (count, hidden))]
    if names.correction_bias:
        tensors.append(("gate.e_score_correction_bias", (count,)))
    for expert in range(count):
        tensors += _expert(f"experts.{expert}", width, hidden, names)
    shared_width = config.shared_expert_intermediate_size or width * (config.n_shared_experts or 0)
    if names.shared and shared_width:
        tensors += _expert(names.shared, shared_width, hidden, names)
        if names.shared_gate:
            tensors.append((f"{names.shared}_gate.weight", (1, hidden)))
    return tensors


def _expert(prefix: str, width: int, hidden: int, names: ExpertNames) -> _Named:
    return [
        (f"{prefix}.{names.gate}.weight", (width, hidden)),
        (f"{prefix}.{names.up}.weight", (width, hidden)),
        (f"{prefix}.{names.down}.weight", (hidden, width)),
    ]


def _projection(name: str, rows: int, columns: int, *, bias: bool) -> _Named:
    weight: _Named = [(f"{name}.weight", (rows, columns))]
    return [*weight, (f"{name}.bias", (rows,))] if bias else weight
