"""The destination layouts of an engine that runs tensor, pipeline and expert parallel.

Only `rollsync plan` needs it, which has no engine to ask: in a sync, `kept` decides by what a
rank's loader was seen to read. It follows how vLLM shards the models whose tensors have Hugging
Face's names (read in vLLM 0.32):

- tensor-parallel ranks keep what `cuts` says of every tensor;
- layers are dealt to pipeline stages evenly, what is left over going to the stages before the last;
- with expert parallelism a rank keeps whole experts, a run of neighbours, also of a tensor that
  holds all experts of a layer; without, slices of all.

Rule kept here: a rank is data-parallel group, then stage, then tensor-parallel rank, counted in
that order; ranks that keep the same parts share one shard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.cuts import holds_all_experts, slices
from rollsync.pure.refit.errors import (
    DimensionNotDivisible,
    ExpertGroupsUneven,
    ParallelError,
    SizeNotPositive,
    TooFewLayers,
    WorldNotDivisible,
)
from rollsync.pure.refit.layout import Box, Part, parts_of, slice_of, whole

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")


class Parallelism(Struct, frozen=True, kw_only=True):
    """Sizes of the parallel groups of the generation side.

    Attributes:
        rollout_world_size: All rollout workers.
        tensor_parallel: Ranks that share a layer.
        pipeline_parallel: Stages that share the layers.
        expert_parallel: Ranks that share the experts of a layer: 1, or a multiple of
            `tensor_parallel` that divides the ranks of one stage over all data-parallel groups.
    """

    rollout_world_size: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1


class Shards(Struct, frozen=True, kw_only=True):
    """What the rollout ranks keep.

    Attributes:
        layouts: The different layouts.
        shard_of_rank: For every rollout rank, the index of its layout.
    """

    layouts: tuple[tuple[Part, ...], ...]
    shard_of_rank: tuple[int, ...]


class _Located(NamedTuple):
    spec: TensorSpec
    layer: int | None
    expert: int | None
    """Whose tensor it is, where each expert has tensors of its own."""
    experts: int
    """How many it holds something of; 0 when it is of one, or of none."""


class _Model(NamedTuple):
    tensors: Sequence[_Located]
    by_name: Mapping[str, TensorSpec]
    layers: int
    experts: int
    """Of a layer, where each expert has tensors of its own."""
    kv_heads: int | None


def plan_shards(
    specs: Sequence[TensorSpec], parallelism: Parallelism, *, kv_heads: int | None
) -> Result[Shards, ParallelError]:
    """The layout of every rollout rank.

    Args:
        specs: The model's tensors under Hugging Face's names.
        parallelism: How the engines run.
        kv_heads: How many key and value heads a layer has; None where it has none to repeat.
    """
    error = check_parallelism(parallelism)
    if error is not None:
        return Failure(error)
    located = [_located(spec) for spec in specs]
    layers = 1 + max((each.layer or 0 for each in located), default=0)
    if layers < parallelism.pipeline_parallel:
        return Failure(TooFewLayers(layers=layers, pipeline_parallel=parallelism.pipeline_parallel))
    experts = 1 + max((each.expert or 0 for each in located), default=0)
    model = _Model(located, {spec.name: spec for spec in specs}, layers, experts, kv_heads)
    shards: dict[tuple[int, int, int], int] = {}
    layouts: list[tuple[Part, ...]] = []
    shard_of_rank: list[int] = []
    for rank in range(parallelism.rollout_world_size):
        place = place_of(rank, parallelism)
        if place not in shards:
            layout = _layout(model, parallelism, place)
            if not is_successful(layout):
                return Failure(layout.failure())
            shards[place] = len(layouts)
            layouts.append(layout.unwrap())
        shard_of_rank.append(shards[place])
    return Success(Shards(layouts=tuple(layouts), shard_of_rank=tuple(shard_of_rank)))


def whole_model(specs: Sequence[TensorSpec], rollout_world_size: int) -> Shards:
    """The layouts of ranks that are sent every tensor whole, and slice it themselves."""
    layout = tuple(Part(n, whole(spec)) for spec in specs for n in spec.names)
    return Shards(layouts=(layout,), shard_of_rank=(0,) * rollout_world_size)


def check_parallelism(
    parallelism: Parallelism,
) -> SizeNotPositive | WorldNotDivisible | ExpertGroupsUneven | None:
    """What is wrong with the sizes of the groups, or None."""
    tensor, expert = parallelism.tensor_parallel, parallelism.expert_parallel
    for what, size in (
        ("rollout world size", parallelism.rollout_world_size),
        ("tensor-parallel size", tensor),
        ("pipeline-parallel size", parallelism.pipeline_parallel),
        ("expert-parallel size", expert),
    ):
        if size < 1:
            return SizeNotPositive(what=what, size=size)
    if parallelism.rollout_world_size % (tensor * parallelism.pipeline_parallel):
        return WorldNotDivisible(
            rollout_world_size=parallelism.rollout_world_size,
            tensor_parallel=tensor,
            pipeline_parallel=parallelism.pipeline_parallel,
        )
    stage_ranks = parallelism.rollout_world_size // parallelism.pipeline_parallel
    if expert > 1 and (expert % tensor or stage_ranks % expert):
        return ExpertGroupsUneven(
            expert_parallel=expert, tensor_parallel=tensor, stage_ranks=stage_ranks
        )
    return None


def place_of(rank: int, parallelism: Parallelism) -> tuple[int, int, int]:
    """Pipeline stage, tensor-parallel rank and expert-parallel rank of a rollout rank."""
    tensor = parallelism.tensor_parallel
    group, local_rank = divmod(rank, tensor * parallelism.pipeline_parallel)
    stage, tensor_rank = divmod(local_rank, tensor)
    return stage, tensor_rank, (group * tensor + tensor_rank) % parallelism.expert_parallel


def stage_of_layers(layers: int, stages: int) -> tuple[int, ...]:
    """For every layer, its pipeline stage."""
    counts = [layers // stages] * stages
    for index in range(layers % stages):
        counts[-2 - index] += 1
    return tuple(stage for stage, count in enumerate(counts) for _ in range(count))


def experts_of(expert_rank: int, ranks: int, experts: int) -> range:
    """The experts that an expert-parallel rank keeps; the first ranks keep one more."""
    each, more = divmod(experts, ranks)
    start = expert_rank * each + min(expert_rank, more)
    return range(start, start + each + (expert_rank < more))


def _layout(
    model: _Model, parallelism: Parallelism, place: tuple[int, int, int]
) -> Result[tuple[Part, ...], DimensionNotDivisible]:
    stage, tensor_rank, expert_rank = place
    stages, expert_ranks = parallelism.pipeline_parallel, parallelism.expert_parallel
    stage_of = stage_of_layers(model.layers, stages)
    own_experts = experts_of(expert_rank, expert_ranks, model.experts)
    parts: list[Part] = []
    for spec, layer, expert, experts in model.tensors:
        if layer is not None and stage_of[layer] != stage:
            continue
        if expert is not None and expert_ranks > 1 and expert not in own_experts:
            continue
        names = spec.names
        if layer is None:
            names = tuple(name for name in names if stage in _outer_stages(name, stages))
        boxes: tuple[Box, ...] | DimensionNotDivisible
        if expert_ranks > 1 and experts:
            held = experts_of(expert_rank, expert_ranks, experts)
            boxes = (slice_of(spec, 0, held.start, len(held)),)
        elif expert_ranks > 1 and expert is not None:
            boxes = (whole(spec),)
        else:
            tensor_ranks = parallelism.tensor_parallel
            boxes = slices(spec, model.by_name, tensor_ranks, tensor_rank, model.kv_heads)
        if isinstance(boxes, DimensionNotDivisible):
            return Failure(boxes)
        kept = parts_of(spec, boxes) if math.prod(spec.shape) else boxes
        parts.extend(Part(name, box) for box in kept for name in names)
    return Success(tuple(parts))


def _outer_stages(name: str, stages: int) -> tuple[int, ...]:
    """The stages that keep a tensor outside the layers: the embedding comes before them."""
    return (0,) if "embed_tokens" in name.split(".") else (stages - 1,)


def _located(spec: TensorSpec) -> _Located:
    experts = spec.shape[0] if holds_all_experts(spec) else 0
    return _Located(spec, _number(_LAYER, spec), _number(_EXPERT, spec), experts)


def _number(pattern: re.Pattern[str], spec: TensorSpec) -> int | None:
    found = pattern.search(spec.name)
    return None if found is None else int(found[1])
