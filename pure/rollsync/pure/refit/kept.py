"""Which parts of the declared tensors a rank keeps, as its own loader has shown.

What a loader reads is what a tensor is for it, whatever it does with that: it may cut a fused
projection into the heads of its rank, take its experts out of a tensor of all, transpose or convert
them. Whole are only what a loader reads whole before it cuts it: of the models whose loaders were
tried (vLLM 0.32), the query and key weights of llama4, whose rows are reordered for all heads.

Rule kept here: a part is left out only when the loader was seen not to read it. When what was read
of a tensor is no box of its elements, or is boxes that overlap, all of it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.layout import Box, Part, joined, parts_of, union_elements, whole
from rollsync.pure.refit.load_plan import LoadPlan, PlannedTensor


def kept_layout(specs: Iterable[TensorSpec], plan: LoadPlan) -> tuple[Part, ...]:
    """The layout of the rank whose loader was watched.

    Args:
        specs: The declared tensors in stream order. A tensor has the same parts under all names.
        plan: What the loader did with them. A tensor that it was not given is kept whole.
    """
    return tuple(
        Part(name, box)
        for spec in specs
        for box in _kept_boxes(spec, plan.tensors.get(spec.name))
        for name in spec.names
    )


def kept_bytes(specs: Iterable[TensorSpec], layout: Iterable[Part]) -> int:
    """Bytes that a rank of this layout is sent, tied tensors once."""
    dtypes = {spec.name: spec.dtype for spec in specs}
    return sum(
        part.box.elements * DTYPE_BYTES[dtypes[part.name]] for part in layout if part.name in dtypes
    )


def box_of_view(
    offset: int, sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int]
) -> Box | None:
    """The elements of a contiguous tensor that a view of it has, in whatever order it has them, and
    however often; None if they are no box.

    Args:
        offset: Elements from the tensor's first to the view's first.
        sizes: Of the view's dimensions, none of which is 0.
        strides: Elements from one to the next in each of them.
        shape: Of the tensor.
    """
    if offset >= math.prod(shape):
        return None
    steps = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    starts = [offset // step % size for step, size in zip(steps, shape, strict=True)]
    held = [1] * len(shape)
    for stride, count in _merged(sizes, strides):
        rows = [d for d, step in enumerate(steps) if step == stride and held[d] == 1]
        if not rows or not _extend(starts, held, shape, rows[-1], count):
            return None
    return Box(tuple(starts), tuple(held))


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Stride and size of a view's dimensions, the innermost first, those in one go as one."""
    merged: list[tuple[int, int]] = []
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size == 1 or stride == 0:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def _extend(
    starts: Sequence[int], sizes: list[int], shape: Sequence[int], dimension: int, count: int
) -> bool:
    """Let `count` neighbours lie in the box, from a dimension on outwards."""
    while count > 1:
        if dimension < 0 or sizes[dimension] != 1:
            return False
        if starts[dimension] + count <= shape[dimension]:
            sizes[dimension] = count
            return True
        if starts[dimension] or count % shape[dimension]:
            return False
        sizes[dimension] = shape[dimension]
        count //= shape[dimension]
        dimension -= 1
    return True


def _kept_boxes(spec: TensorSpec, planned: PlannedTensor | None) -> tuple[Box, ...]:
    everything = (whole(spec),)
    if planned is None or planned.spec.shape != spec.shape or not math.prod(spec.shape):
        return everything
    boxes = joined(planned.reads)
    if union_elements(boxes) != sum(box.elements for box in boxes):
        return everything
    return parts_of(spec, boxes)
