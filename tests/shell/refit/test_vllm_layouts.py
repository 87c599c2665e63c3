"""The layouts that pure plans are the parts that vLLM's own loader reads of a saved model, and what
it loads of these parts alone is what it loads of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.cuts import Attention
from rollsync.pure.refit.layout import Box, Part, plan_parts
from rollsync.pure.refit.parallel import Parallelism, plan_shards
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.intake import Batch, KeptParts
from rollsync.shell.refit.learned_load import LearnedLoad
from rollsync.shell.refit.load_recorder import serving_tensors
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
    fused: bool = False
    """Experts, or projections, that share a tensor, as transformers holds them."""

    def model(self, seed: int = 0) -> PreTrainedModel:
        torch.manual_seed(seed)
        own: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "tie_word_embeddings": self.tied,
        }
        if not self.experts:
            if self.fused:
                return Phi3ForCausalLM(Phi3Config(**SIZES, **own))
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

    def weights(self, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """As published, where a checkpoint has each expert of a layer alone, unless `fused`."""
        for name, tensor in checkpoint_weights(self.model(seed)):
            layer, joined, projection = name.partition(".experts.")
            if not joined or self.fused:
                yield name, tensor
                continue
            for expert, one in enumerate(tensor):
                gates = one.chunk(2) if projection == "gate_up_proj" else (one,)
                names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
                for own, part in zip(names, gates, strict=True):
                    yield f"{layer}.experts.{expert}.{own}.weight", part.contiguous()

    def specs(self) -> list[TensorSpec]:
        if not self.experts or self.fused:
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
    "sliced-fused-experts": Case(parallel(2, tensor=2), experts=4, fused=True),
    "whole-fused-experts": Case(parallel(2, tensor=2, expert=2), experts=5, fused=True),
    "fused-projections": Case(parallel(2, tensor=2), kv_heads=2, fused=True),
}


@dataclass(frozen=True)
class Learned:
    layout: tuple[Part, ...]
    different: list[str]
    """Parameters that a load of these parts left otherwise than one of whole tensors."""


def learn_parts(model: VllmModel) -> Learned:
    """What this rank's loader reads, and what it makes of that alone."""
    case = CASES[Path(model.config.model_config.model).name]
    known = LearnedLoad(lambda: model.module, is_shared=True)
    known.declare(case.specs())

    def load(loads: Iterable[Batch], *, watched: bool) -> None:
        recorder = known.reception(directly=False).recorder if watched else None
        update = model.update(recorder)
        update.start()
        for each in loads:
            update.load(each)
        update.finish()
        if recorder is not None:
            known.learn(recorder)

    load([list(case.weights())], watched=True)
    layout = known.reception(directly=False).layout or ()
    weights = dict(case.weights(seed=1))
    parts = [
        (part.spec.name, inside(weights[part.source], part.box).clone())
        for part in plan_parts(case.specs(), layout, rank=0).unwrap()
    ]
    load(KeptParts(case.specs(), layout).loads(parts), watched=True)
    of_parts = {n: t.clone() for n, (_, t) in serving_tensors(model.module).items()}
    load([list(case.weights())], watched=False)
    load([list(case.weights(seed=1))], watched=False)
    of_all = {name: tensor for name, (_, tensor) in serving_tensors(model.module).items()}
    different = [name for name, each in of_all.items() if not torch.equal(each, of_parts[name])]
    return Learned(layout, different)


def sent(specs: list[TensorSpec], layout: tuple[Part, ...]) -> set[tuple[str, Box]]:
    """What a rank of this layout is sent, under whatever name it keeps it."""
    return {(part.source, part.box) for part in plan_parts(specs, layout, rank=0).unwrap()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_planned_layout_is_what_the_loader_needs(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    case.model().save_pretrained(tmp_path / name)
    specs, parallelism = case.specs(), case.parallelism
    shards = plan_shards(specs, parallelism, Attention(kv_heads=case.kv_heads)).unwrap()
    learned = on_ranks(
        learn_parts,
        str(tmp_path / name),
        ranks=parallelism.rollout_world_size,
        plain=True,
        stages=parallelism.pipeline_parallel,
        whole_experts=parallelism.expert_parallel > 1,
    )
    for rank, own in enumerate(learned):
        planned = shards.layouts[shards.shard_of_rank[rank]]
        assert sent(specs, own.layout) == sent(specs, planned), rank
        assert own.different == [], rank
