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
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.cuts import (
    Attention,
    Cutting,
    cutting_of,
    holds_all_experts,
    slices,
)
from rollsync.pure.refit.errors import (
    BeyondPlanning,
    DimensionNotDivisible,
    ExpertGroupsUneven,
    HeadsNotDivisible,
    ParallelError,
    SizeNotPositive,
    TooFewExperts,
    TooFewLayers,
    WorldNotDivisible,
)
from rollsync.pure.refit.layout import PART_BYTES, Box, Part, parts_of, slice_of, whole
from rollsync.pure.refit.plan_limits import beyond, check_model

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_LONGEST_NUMBER: Final = 9
"""Digits that are read of a name: more than any number has that a plan is made for."""


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


class _Kind(NamedTuple):
    """All that decides which parts a place keeps of a tensor: in one stage, tensors of one kind are
    kept alike."""

    shape: tuple[int, ...]
    dtype: str
    cutting: Cutting | None
    is_of_one_expert: bool
    experts: int
    """How many it holds something of; 0 when it is of one, or of none."""


class _Located(NamedTuple):
    spec: TensorSpec
    kind: _Kind
    layer: int | None
    expert: int | None
    """Whose tensor it is, where each expert has tensors of its own."""


class _Place(NamedTuple):
    stage: int
    tensor_rank: int
    expert_rank: int


class _Model(NamedTuple):
    tensors: Sequence[_Located]
    layers: int
    experts: int
    """Of a layer; 0 where there are none."""


def plan_shards(
    specs: Sequence[TensorSpec], parallelism: Parallelism, attention: Attention
) -> Result[Shards, ParallelError]:
    """The layout of every rollout rank.

    Args:
        specs: The model's tensors under Hugging Face's names.
        parallelism: How the engines run.
        attention: What the model's configuration says of it.
    """
    error = (
        check_parallelism(parallelism)
        or beyond("rollout workers", parallelism.rollout_world_size)
        or check_model(specs)
    )
    if error is not None:
        return Failure(error)
    model = _located(specs, attention)
    unfit = _check_fit(model, parallelism, attention)
    if unfit is not None:
        return Failure(unfit)
    held = _tensors_of_places(model, parallelism)
    shards: dict[_Place, int] = {}
    layouts: list[tuple[Part, ...]] = []
    shard_of_rank: list[int] = []
    for rank in range(parallelism.rollout_world_size):
        place = _Place(*place_of(rank, parallelism))
        if place not in shards:
            tensors = [model.tensors[index] for index in held(place)]
            layout = _layout(tensors, parallelism, place)
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


def _check_fit(
    model: _Model, parallelism: Parallelism, attention: Attention
) -> HeadsNotDivisible | TooFewLayers | TooFewExperts | BeyondPlanning | None:
    """Whether an engine can run the model so, and the plan is not too long."""
    tensor, stages = parallelism.tensor_parallel, parallelism.pipeline_parallel
    expert = parallelism.expert_parallel
    heads, kv_heads = attention.heads, attention.kv_heads or attention.heads
    if heads and kv_heads and (heads % tensor or (kv_heads % tensor and tensor % kv_heads)):
        return HeadsNotDivisible(heads=heads, kv_heads=kv_heads, tensor_parallel=tensor)
    too_many = beyond("layers", model.layers) or beyond("experts", model.experts)
    if too_many is not None:
        return too_many
    if model.layers < stages:
        return TooFewLayers(layers=model.layers, pipeline_parallel=stages)
    if expert > 1 and model.experts < expert:
        return TooFewExperts(experts=model.experts, expert_parallel=expert)
    # Every rank of a stage keeps something of its tensors; of an expert's, one rank or all.
    ranks = max(tensor, expert)
    alone = sum(each.expert is not None for each in model.tensors) if expert > 1 else 0
    large = sum(each.spec.tensor_bytes for each in model.tensors) // PART_BYTES
    return beyond("parts", (len(model.tensors) - alone) * ranks + alone + large)


def _tensors_of_places(
    model: _Model, parallelism: Parallelism
) -> Callable[[_Place], Sequence[int]]:
    """Which tensors something is kept of at a place, by their indices, in order."""
    stages, expert_ranks = parallelism.pipeline_parallel, parallelism.expert_parallel
    stage_of = stage_of_layers(model.layers, stages)
    rank_of = [
        rank for rank in range(expert_ranks) for _ in experts_of(rank, expert_ranks, model.experts)
    ]
    of_all: dict[int, list[int]] = {}
    of_one: dict[tuple[int, int], list[int]] = {}
    for index, (spec, _, layer, expert) in enumerate(model.tensors):
        names = spec.names
        own = _outer_stages(names, stages) if layer is None else {stage_of[layer]}
        for stage in own:
            if expert is None or expert_ranks == 1:
                of_all.setdefault(stage, []).append(index)
            else:
                of_one.setdefault((stage, rank_of[expert]), []).append(index)

    def held(place: _Place) -> Sequence[int]:
        alone = of_one.get((place.stage, place.expert_rank), [])
        return sorted([*of_all.get(place.stage, []), *alone])

    return held


def _layout(
    tensors: Iterable[_Located], parallelism: Parallelism, place: _Place
) -> Result[tuple[Part, ...], DimensionNotDivisible]:
    stages = parallelism.pipeline_parallel
    boxes_of: dict[_Kind, tuple[Box, ...]] = {}
    parts: list[Part] = []
    for spec, kind, layer, _ in tensors:
        boxes = boxes_of.get(kind)
        if boxes is None:
            kept = _boxes(spec, kind, parallelism, place)
            if isinstance(kept, DimensionNotDivisible):
                return Failure(kept)
            boxes = boxes_of[kind] = parts_of(spec, kept) if math.prod(spec.shape) else kept
        names: Sequence[str] = spec.names
        if layer is None:
            names = [name for name in names if place.stage == _outer_stage(name, stages)]
        parts.extend(Part(name, box) for box in boxes for name in names)
    return Success(tuple(parts))


def _boxes(
    spec: TensorSpec, kind: _Kind, parallelism: Parallelism, place: _Place
) -> tuple[Box, ...] | DimensionNotDivisible:
    expert_ranks = parallelism.expert_parallel
    if expert_ranks > 1 and kind.experts:
        held = experts_of(place.expert_rank, expert_ranks, kind.experts)
        return (slice_of(spec, 0, held.start, len(held)),)
    if expert_ranks > 1 and kind.is_of_one_expert:
        return (whole(spec),)
    return slices(spec, kind.cutting, parallelism.tensor_parallel, place.tensor_rank)


def _outer_stage(name: str, stages: int) -> int:
    """The stage that keeps a tensor outside the layers: the embedding comes before them."""
    return 0 if "embed_tokens" in name.split(".") else stages - 1


def _outer_stages(names: Iterable[str], stages: int) -> set[int]:
    return {_outer_stage(name, stages) for name in names}


def _located(specs: Sequence[TensorSpec], attention: Attention) -> _Model:
    by_name = {spec.name: spec for spec in specs}
    kinds: dict[_Kind, _Kind] = {}
    tensors: list[_Located] = []
    for spec in specs:
        expert = _number(_EXPERT, spec)
        kind = _Kind(
            spec.shape,
            spec.dtype,
            cutting_of(spec, by_name, attention),
            expert is not None,
            spec.shape[0] if holds_all_experts(spec) else 0,
        )
        kind = kinds.setdefault(kind, kind)
        tensors.append(_Located(spec, kind, _number(_LAYER, spec), expert))
    layers = 1 + max((each.layer or 0 for each in tensors), default=0)
    alone = max((each.expert for each in tensors if each.expert is not None), default=-1)
    return _Model(tensors, layers, max([alone + 1, *(kind.experts for kind in kinds)]))


def _number(pattern: re.Pattern[str], spec: TensorSpec) -> int | None:
    found = pattern.search(spec.name)
    return None if found is None else int(found[1].lstrip("0")[:_LONGEST_NUMBER] or "0")
