"""What a tensor-parallel rank keeps of one tensor, by the tensor's Hugging Face name.

It follows vLLM's loaders (read in vLLM 0.32):

- projections into heads and into the feed-forward are cut by rows, those out of them by columns;
- several in one tensor, one above the other, are cut each: gate and up in `gate_up_proj`; query,
  key and value in `qkv_proj`, whose query rows are as many as `o_proj` has columns;
- key and value heads fewer than ranks are repeated, and each rank keeps one;
- embedding and output rows are padded to a multiple of 64 and cut evenly; the padding is not sent;
- in a tensor that holds all experts of a layer each expert is cut like its projection; its rows and
  columns are either way around, which the layer's two tensors together tell;
- everything else is kept whole, and so are the biases of such experts;
- whole are also the query and key weights of a language model whose loader reorders their rows for
  all heads before it cuts them (llama4).

Rule kept here: slices are equal and together are the tensor, or the sizes are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from msgspec import Struct

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.errors import DimensionNotDivisible
from rollsync.pure.refit.layout import Box, slice_of, whole

VOCABULARY_PADDING: Final = 64


class Cut(Enum):
    """How tensor-parallel ranks divide a tensor."""

    ROWS = "rows"
    KV_HEADS = "key and value heads"
    HEADS = "query heads, then key and value heads"
    ROW_PAIRS = "rows of each half"
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"
    EXPERT_PAIRS = "each half of every expert"
    EXPERT_INPUTS = "inputs of every expert"


CUT_OF_MODULE: Final = {
    "q_proj": Cut.ROWS,
    "q_b_proj": Cut.ROWS,
    "kv_b_proj": Cut.ROWS,
    "k_proj": Cut.KV_HEADS,
    "v_proj": Cut.KV_HEADS,
    "qkv_proj": Cut.HEADS,
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

_ALL_EXPERTS: Final = re.compile(r"(?:^|\.)experts\.(gate_up_proj|down_proj)(_bias)?$")


_REORDERED: Final = frozenset({"q_proj", "k_proj"})
_NOT_OF_THE_LANGUAGE_MODEL: Final = "vision_model"


class Attention(Struct, frozen=True, kw_only=True):
    """What a model's configuration says of its attention, and its tensors do not.

    Attributes:
        heads: Query heads of a layer; None where they are not known.
        kv_heads: Key and value heads of a layer; None where it has none to repeat.
        reorders_rows: The loader reorders the rows of query and key weights for all heads.
    """

    heads: int | None = None
    kv_heads: int | None = None
    reorders_rows: bool = False


class Cutting(NamedTuple):
    """How ranks divide a tensor, for any number of them. Tensors of one shape and one of these are
    divided alike.

    Attributes:
        cut: In which way.
        dimension: Which one is cut.
        query_rows: Of a tensor with query, key and value; 0 of all others.
        kv_heads: As in `Attention`.
    """

    cut: Cut
    dimension: int
    query_rows: int
    kv_heads: int | None


class _Stretch(NamedTuple):
    """Neighbouring rows, or columns, that are cut among themselves."""

    first: int
    size: int
    parts: int
    kept: int
    """Which of the parts is kept."""


def holds_all_experts(spec: TensorSpec) -> bool:
    """Whether a tensor has something of every expert of a layer, one expert after the other."""
    return len(spec.shape) > 1 and _ALL_EXPERTS.search(spec.name) is not None


def cut_of(name: str) -> Cut | None:
    """How tensor-parallel ranks divide a tensor; None when each keeps it whole."""
    experts = _ALL_EXPERTS.search(name)
    if experts is not None:
        if experts[2]:
            return None
        return Cut.EXPERT_PAIRS if experts[1] == "gate_up_proj" else Cut.EXPERT_INPUTS
    module, _, parameter = name.rpartition(".")
    cut = CUT_OF_MODULE.get(module.rpartition(".")[2])
    if cut is Cut.COLUMNS and parameter == "bias":
        return None
    return cut


def cutting_of(
    spec: TensorSpec, model: Mapping[str, TensorSpec], attention: Attention
) -> Cutting | None:
    """How ranks divide a tensor; None when each keeps it whole.

    Args:
        spec: The tensor.
        model: All tensors by name; the ones beside it tell what lies in it.
        attention: What they do not tell.
    """
    cut = cut_of(spec.name)
    if cut is None or not spec.shape or (attention.reorders_rows and _is_reordered(spec.name)):
        return None
    dimension = _dimension(spec, cut, model)
    if dimension is None:
        return None
    query = 0
    if cut is Cut.HEADS:
        found = _query_rows(spec, model)
        if found is None or found > spec.shape[0] or (spec.shape[0] - found) % 2:
            return None
        query = found
    return Cutting(cut, dimension, query, attention.kv_heads)


def slices(
    spec: TensorSpec, cutting: Cutting | None, ranks: int, rank: int
) -> tuple[Box, ...] | DimensionNotDivisible:
    """What a rank keeps of a tensor.

    Args:
        spec: The tensor.
        cutting: How ranks divide it, as `cutting_of` has it.
        ranks: Tensor-parallel ranks.
        rank: One of them.
    """
    if ranks == 1 or cutting is None:
        return (whole(spec),)
    cut, dimension, query, kv_heads = cutting
    if cut is Cut.VOCABULARY:
        return _vocabulary(spec, ranks, rank)
    length, kv = spec.shape[dimension], (ranks, rank)
    if cut in (Cut.KV_HEADS, Cut.HEADS) and kv_heads is not None and kv_heads < ranks:
        if ranks % kv_heads:
            return DimensionNotDivisible(tensor=spec.name, dimension=0, size=kv_heads, parts=ranks)
        kv = (kv_heads, rank * kv_heads // ranks)
    match cut:
        case Cut.ROW_PAIRS | Cut.EXPERT_PAIRS:
            if length % (2 * ranks):
                return _refused(spec, dimension, 2 * ranks)
            stretches = [_Stretch(0, length // 2, ranks, rank)]
            stretches.append(_Stretch(length // 2, length // 2, ranks, rank))
        case Cut.HEADS:
            each = (length - query) // 2
            stretches = [_Stretch(0, query, ranks, rank)]
            stretches += [_Stretch(query, each, *kv), _Stretch(query + each, each, *kv)]
        case Cut.KV_HEADS:
            stretches = [_Stretch(0, length, *kv)]
        case _:
            stretches = [_Stretch(0, length, ranks, rank)]
    for stretch in stretches:
        if stretch.size % stretch.parts:
            return _refused(spec, dimension, stretch.parts)
    return tuple(_slice(spec, dimension, stretch) for stretch in stretches)


def _is_reordered(name: str) -> bool:
    modules = name.split(".")
    return (
        modules[-1] == "weight"
        and not _REORDERED.isdisjoint(modules)
        and _NOT_OF_THE_LANGUAGE_MODEL not in modules
    )


def _dimension(spec: TensorSpec, cut: Cut, model: Mapping[str, TensorSpec]) -> int | None:
    """The dimension that is cut; None when it cannot be told."""
    if cut not in (Cut.EXPERT_PAIRS, Cut.EXPERT_INPUTS):
        dimension = 1 if cut is Cut.COLUMNS else 0
        return dimension if dimension < len(spec.shape) else None
    block = spec.name.rpartition(".")[0]
    into, out = model.get(f"{block}.gate_up_proj"), model.get(f"{block}.down_proj")
    if into is None or out is None or len(into.shape) != 3 or len(out.shape) != 3:
        return None
    # Experts x outputs x inputs, or experts x inputs x outputs.
    if into.shape[1:] == (2 * out.shape[2], out.shape[1]):
        return 1 if cut is Cut.EXPERT_PAIRS else 2
    if into.shape[1:] == (out.shape[2], 2 * out.shape[1]):
        return 2 if cut is Cut.EXPERT_PAIRS else 1
    return None


def _query_rows(spec: TensorSpec, model: Mapping[str, TensorSpec]) -> int | None:
    """How many rows of a fused projection belong to queries."""
    attention = spec.name.rpartition(".")[0].rpartition(".")[0]
    output = model.get(f"{attention}.o_proj.weight")
    return None if output is None or len(output.shape) != 2 else output.shape[1]


def _vocabulary(spec: TensorSpec, ranks: int, rank: int) -> tuple[Box] | DimensionNotDivisible:
    rows = spec.shape[0]
    padded = rows + -rows % VOCABULARY_PADDING
    if padded % ranks:
        return DimensionNotDivisible(tensor=spec.name, dimension=0, size=padded, parts=ranks)
    each = padded // ranks
    start = min(rank * each, rows)
    return (slice_of(spec, 0, start, min(each, rows - start)),)


def _slice(spec: TensorSpec, dimension: int, stretch: _Stretch) -> Box:
    each = stretch.size // stretch.parts
    return slice_of(spec, dimension, stretch.first + stretch.kept * each, each)


def _refused(spec: TensorSpec, dimension: int, parts: int) -> DimensionNotDivisible:
    return DimensionNotDivisible(
        tensor=spec.name, dimension=dimension, size=spec.shape[dimension], parts=parts
    )
