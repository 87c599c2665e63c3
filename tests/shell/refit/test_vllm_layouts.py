"""The layouts that pure plans are the parts that vLLM's own loader reads of a saved model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.kept import kept_layout
from rollsync.pure.refit.layout import Part
from rollsync.pure.refit.parallel import Parallelism, plan_shards
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors
from rollsync.shell.refit.weights import dtype_name
from tests.shell.refit.tiny_models import save_model
from tests.shell.refit.vllm_models import VllmModel, on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 2


def saved_specs(path: str) -> list[TensorSpec]:
    weights = load_file(f"{path}/model.safetensors")
    return [TensorSpec(n, tuple(t.shape), dtype_name(t.dtype)) for n, t in weights.items()]


def save_experts(path: Path) -> str:
    """A mixture of experts, with one that every token goes through."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen2MoeForCausalLM(config).save_pretrained(path)
    return str(path)


def read_parts(model: VllmModel) -> tuple[Part, ...]:
    """What this rank's loader reads."""
    from rollsync.shell.refit.vllm_loader import VllmModelUpdate

    path: str = model.config.model_config.model
    recorder = LoadRecorder(serving_tensors(model.module))
    update = VllmModelUpdate(model.config, model.config.model_config, model.module, recorder)
    update.start()
    update.load(list(load_file(f"{path}/model.safetensors").items()))
    update.finish()
    tensors = {name: tensor for name, (_, tensor) in serving_tensors(model.module).items()}
    return kept_layout(saved_specs(path), recorder.plan(tensors.get))


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_planned_layout_is_what_the_loader_reads(tmp_path: Path, experts: bool) -> None:
    folder = tmp_path / "model"
    path = save_experts(folder) if experts else save_model(folder)
    specs = saved_specs(path)
    parallelism = Parallelism(rollout_world_size=RANKS, tensor_parallel=RANKS)
    shards = plan_shards(specs, parallelism, kv_heads=2).unwrap()
    read = on_ranks(read_parts, path, ranks=RANKS, plain=True)
    for rank, parts in enumerate(read):
        planned = shards.layouts[shards.shard_of_rank[rank]]
        assert sorted(parts) == sorted(planned)
