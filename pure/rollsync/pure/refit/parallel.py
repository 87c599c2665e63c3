"""The destination layouts of an engine that runs tensor, pipeline and expert parallel.

It follows how vLLM shards the models whose tensors have Hugging Face's names (read in vLLM 0.32):

- projections into heads and into the feed-forward are cut by rows, those out of them by columns;
  two in one tensor, one above the other, are cut each;
- key and value heads fewer than ranks are repeated, and each rank keeps one;
- embedding and output rows are padded to a multiple of 64 and cut evenly; the padding is not sent;
- layers are dealt to pipeline stages evenly, what is left over going to the stages before the last;
- with expert parallelism a rank keeps whole experts, a run of neighbours; without, slices of all;
- everything else is kept whole.

Rule kept here: a rank is data-parallel group, then stage, then tensor-parallel rank, counted in
that order; ranks that keep the same parts share one shard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.errors import (
    DimensionNotDivisible,
    ExpertGroupsUneven,
    ParallelError,
    SizeNotPositive,
    TooFewLayers,
    WorldNotDivisible,
)
from rollsync.pure.refit.layout import Box, Part, slice_of, whole

VOCABULARY_PADDING: Final = 64


class Cut(Enum):
    """How tensor-parallel ranks divide a tensor."""

    ROWS = "rows"
    KV_HEADS = "key and value heads"
    ROW_PAIRS = "rows of each half"
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"


CUT_OF_MODULE: Final = {
    "q_proj": Cut.ROWS,
    "q_b_proj": Cut.ROWS,
    "kv_b_proj": Cut.ROWS,
    "k_proj": Cut.KV_HEADS,
    "v_proj": Cut.KV_HEADS,
    "gate_proj": Cut.ROWS,
    "up_proj": Cut.ROWS,
    "gate_up_proj": Cut.ROW_PAIRS,
    "w1": Cut.ROWS,
    "w3": Cut.ROWS,
    "o_proj": Cut.COLUMNS,
    "down_proj": Cut.COLUMNS,
    "w2": Cut.COLUMNS,
    "embed_tokens": Cut.VOCABULARY,
    "lm_head": Cut.VOCABULARY,
}
"""By the name of the module that holds the tensor; a module that is not here is kept whole."""

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
    located = [_Located(spec, _number(_LAYER, spec), _number(_EXPERT, spec)) for spec in specs]
    layers = 1 + max((each.layer or 0 for each in located), default=0)
    if layers < parallelism.pipeline_parallel:
        return Failure(TooFewLayers(layers=layers, pipeline_parallel=parallelism.pipeline_parallel))
    experts = 1 + max((each.expert or 0 for each in located), default=0)
    shards: dict[tuple[int, int, int], int] = {}
    layouts: list[tuple[Part, ...]] = []
    shard_of_rank: list[int] = []
    for rank in range(parallelism.rollout_world_size):
        place = place_of(rank, parallelism)
        if place not in shards:
            layout = _layout(located, parallelism, place, (layers, experts, kv_heads))
            if not is_successful(layout):
                return Failure(layout.failure())
            shards[place] = len(layouts)
            layouts.append(layout.unwrap())
        shard_of_rank.append(shards[place])
    return Success(Shards(layouts=tuple(layouts), shard_of_rank=tuple(shard_of_rank)))


def whole_model(specs: Sequence[TensorSpec], rollout_world_size: int) -> Shards:
    """The layouts of ranks that are sent every tensor whole, and slice it themselves."""
    layout = tuple(Part(n, whole(spec)) for spec in specs for n in (spec.name, *spec.aliases))
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


def cut_of(name: str) -> Cut | None:
    """How tensor-parallel ranks divide a tensor; None when each keeps it whole."""
    module, _, parameter = name.rpartition(".")
    cut = CUT_OF_MODULE.get(module.rpartition(".")[2])
    if cut is Cut.COLUMNS and parameter == "bias":
        return None
    return cut


def _layout(
    tensors: Sequence[_Located],
    parallelism: Parallelism,
    place: tuple[int, int, int],
    model: tuple[int, int, int | None],
) -> Result[tuple[Part, ...], DimensionNotDivisible]:
    stage, tensor_rank, expert_rank = place
    layers, experts, kv_heads = model
    stages = parallelism.pipeline_parallel
    stage_of = stage_of_layers(layers, stages)
    whole_experts = parallelism.expert_parallel > 1
    own_experts = experts_of(expert_rank, parallelism.expert_parallel, experts)
    parts: list[Part] = []
    for spec, layer, expert in tensors:
        if layer is not None and stage_of[layer] != stage:
            continue
        if expert is not None and whole_experts and expert not in own_experts:
            continue
        names = (spec.name, *spec.aliases)
        if layer is None:
            names = tuple(name for name in names if stage in _outer_stages(name, stages))
        boxes: tuple[Box, ...] | DimensionNotDivisible = (whole(spec),)
        if expert is None or not whole_experts:
            boxes = _slices(spec, parallelism.tensor_parallel, tensor_rank, kv_heads)
        if isinstance(boxes, DimensionNotDivisible):
            return Failure(boxes)
        for box in boxes:
            if box.elements or not math.prod(spec.shape):
                parts.extend(Part(name, box) for name in names)
    return Success(tuple(parts))


def _outer_stages(name: str, stages: int) -> tuple[int, ...]:
    """The stages that keep a tensor outside the layers: the embedding comes before them."""
    return (0,) if "embed_tokens" in name.split(".") else (stages - 1,)


def _slices(
    spec: TensorSpec, ranks: int, rank: int, kv_heads: int | None
) -> tuple[Box, ...] | DimensionNotDivisible:
    """What a rank keeps of a tensor: one box, or one of each half."""
    if ranks == 1 or not spec.shape or cut_of(spec.name) is not Cut.ROW_PAIRS:
        box = _slice(spec, ranks, rank, kv_heads)
        return box if isinstance(box, DimensionNotDivisible) else (box,)
    half, odd = divmod(spec.shape[0], 2)
    if odd or half % ranks:
        return DimensionNotDivisible(
            tensor=spec.name, dimension=0, size=spec.shape[0], parts=2 * ranks
        )
    each = half // ranks
    return slice_of(spec, 0, rank * each, each), slice_of(spec, 0, half + rank * each, each)


def _slice(
    spec: TensorSpec, ranks: int, rank: int, kv_heads: int | None
) -> Box | DimensionNotDivisible:
    cut = cut_of(spec.name)
    if ranks == 1 or cut is None or not spec.shape:
        return whole(spec)
    if cut is Cut.VOCABULARY:
        padded = spec.shape[0] + -spec.shape[0] % VOCABULARY_PADDING
        each = padded // ranks
        start = min(rank * each, spec.shape[0])
        size = min(each, spec.shape[0] - start)
        return (
            DimensionNotDivisible(tensor=spec.name, dimension=0, size=padded, parts=ranks)
            if padded % ranks
            else slice_of(spec, 0, start, size)
        )
    parts = ranks
    if cut is Cut.KV_HEADS and kv_heads is not None and kv_heads < ranks:
        if ranks % kv_heads:
            return DimensionNotDivisible(tensor=spec.name, dimension=0, size=kv_heads, parts=ranks)
        parts, rank = kv_heads, rank * kv_heads // ranks
    dimension = 1 if cut is Cut.COLUMNS else 0
    length = spec.shape[dimension]
    if length % parts:
        return DimensionNotDivisible(
            tensor=spec.name, dimension=dimension, size=length, parts=parts
        )
    return slice_of(spec, dimension, rank * (length // parts), length // parts)


def _number(pattern: re.Pattern[str], spec: TensorSpec) -> int | None:
    found = pattern.search(spec.name)
    return None if found is None else int(found[1])
