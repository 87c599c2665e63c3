"""The layouts that pure plans are the parts that vLLM's own loader reads of a saved model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.kept import kept_layout
from rollsync.pure.refit.layout import Box, Part, plan_parts
from rollsync.pure.refit.parallel import Parallelism, plan_shards
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors
from rollsync.shell.refit.weights import checkpoint_weights, declare_weights, dtype_name
from tests.shell.refit.vllm_models import VllmModel, on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Case:
    parallelism: Parallelism
    layers: int = 2
    kv_heads: int = 2
    tied: bool = False
    experts: int = 0

    def model(self) -> PreTrainedModel:
        torch.manual_seed(0)
        own: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
        }
        if not self.experts:
            return Qwen2ForCausalLM(Qwen2Config(**SIZES, **own))
        # An expert's slice is as wide as the processor's kernel asks for: what vLLM pads it cannot
        # load again. One expert more is there that every token goes through.
        config = Qwen2MoeConfig(
            **SIZES,
            **own,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=64,
            num_experts=self.experts,
            num_experts_per_tok=2,
        )
        return Qwen2MoeForCausalLM(config)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As published: transformers joins the experts of a layer, a checkpoint has each alone."""
        for name, tensor in checkpoint_weights(self.model()):
            layer, joined, projection = name.partition(".experts.")
            if not joined:
                yield name, tensor
                continue
            for expert, one in enumerate(tensor):
                gates = one.chunk(2) if projection == "gate_up_proj" else (one,)
                names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
                for own, part in zip(names, gates, strict=True):
                    yield f"{layer}.experts.{expert}.{own}.weight", part.contiguous()

    def specs(self) -> list[TensorSpec]:
        if not self.experts:
            return list(declare_weights(self.model()).values())
        return [
            TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            for name, tensor in self.weights()
        ]


def parallel(ranks: int, *, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> Parallelism:
    return Parallelism(
        rollout_world_size=ranks,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        expert_parallel=expert,
    )


CASES = {
    "a-repeated-head": Case(parallel(2, tensor=2), kv_heads=1),
    "uneven-stages": Case(parallel(2, pipeline=2), layers=3),
    "tied-stages": Case(parallel(2, pipeline=2), tied=True),
    "sliced-stages": Case(parallel(4, tensor=2, pipeline=2)),
    "sliced-experts": Case(parallel(2, tensor=2), experts=4),
    "uneven-experts": Case(parallel(2, tensor=2, expert=2), experts=5),
}


def read_parts(model: VllmModel) -> tuple[Part, ...]:
    """What this rank's loader reads."""
    from rollsync.shell.refit.vllm_loader import VllmModelUpdate

    path = Path(model.config.model_config.model)
    case = CASES[path.name]
    recorder = LoadRecorder(serving_tensors(model.module))
    update = VllmModelUpdate(model.config, model.config.model_config, model.module, recorder)
    update.start()
    update.load(list(case.weights()))
    update.finish()
    tensors = {name: tensor for name, (_, tensor) in serving_tensors(model.module).items()}
    return kept_layout(case.specs(), recorder.plan(tensors.get))


def sent(specs: list[TensorSpec], layout: tuple[Part, ...]) -> set[tuple[str, Box]]:
    """What a rank of this layout is sent, under whatever name it keeps it."""
    return {(part.source, part.box) for part in plan_parts(specs, layout, rank=0).unwrap()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_planned_layout_is_what_the_loader_reads(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    case.model().save_pretrained(tmp_path / name)
    specs, parallelism = case.specs(), case.parallelism
    shards = plan_shards(specs, parallelism, kv_heads=case.kv_heads).unwrap()
    read = on_ranks(
        read_parts,
        str(tmp_path / name),
        ranks=parallelism.rollout_world_size,
        plain=True,
        stages=parallelism.pipeline_parallel,
        whole_experts=parallelism.expert_parallel > 1,
    )
    for rank, parts in enumerate(read):
        planned = shards.layouts[shards.shard_of_rank[rank]]
        assert sent(specs, parts) == sent(specs, planned), rank
