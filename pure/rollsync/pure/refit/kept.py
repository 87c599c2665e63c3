"""Which parts of the declared tensors a rank keeps, as its own loader has shown.

Rule kept here: a part is left out only when the loader was seen not to read it. Whatever of a
tensor is not explained by plain copies, or is no box of its elements, is kept as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.layout import Box, Part, union_elements, whole
from rollsync.pure.refit.load_plan import LoadPlan, PlannedTensor, Region


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
        for name in (spec.name, *spec.aliases)
    )


def kept_bytes(specs: Iterable[TensorSpec], layout: Iterable[Part]) -> int:
    """Bytes that a rank of this layout is sent, tied tensors once."""
    dtypes = {spec.name: spec.dtype for spec in specs}
    return sum(
        part.box.elements * DTYPE_BYTES[dtypes[part.name]] for part in layout if part.name in dtypes
    )


def box_of(region: Region, shape: Sequence[int], item_bytes: int) -> Box | None:
    """The elements of a contiguous tensor that lie in a region of its memory; None if they are no
    box, or are not in the order of their addresses.

    Args:
        region: Of the tensor's memory, which begins at its first element.
        shape: Of the tensor.
        item_bytes: Size of an element.
    """
    numbers = (region.offset, region.run_bytes, region.stride_bytes)
    if any(number % item_bytes for number in numbers) or not region.total_bytes:
        return None
    if region.end > math.prod(shape) * item_bytes:
        return None
    offset, run, stride = (number // item_bytes for number in numbers)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    starts = [offset // step % size for step, size in zip(strides, shape, strict=True)]
    sizes = [1] * len(shape)
    if not _extend(starts, sizes, shape, len(shape) - 1, run):
        return None
    if region.runs > 1:
        rows = [d for d, step in enumerate(strides) if step == stride and sizes[d] == 1]
        if not rows or not _extend(starts, sizes, shape, rows[-1], region.runs):
            return None
    box = Box(tuple(starts), tuple(sizes))
    return box if box.elements * item_bytes == region.total_bytes else None


def _extend(
    starts: Sequence[int], sizes: list[int], shape: Sequence[int], dimension: int, count: int
) -> bool:
    """Let `count` neighbours lie in the box, from a dimension on outwards."""
    while count > 1:
        if dimension < 0:
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
    if planned is None or not planned.explained or planned.spec.shape != spec.shape:
        return everything
    boxes: dict[Box, None] = {}
    for copy in planned.copies:
        box = box_of(copy.source, spec.shape, DTYPE_BYTES[spec.dtype])
        if box is None:
            return everything
        boxes[box] = None
    if union_elements(list(boxes)) != sum(box.elements for box in boxes):
        return everything
    return tuple(boxes)
