"""Destination layout: which part of each tensor a rollout rank keeps, and what it is sent.

A rank reports its parts: boxes of elements (a tensor-parallel slice, a whole expert, nothing of the
layers of another pipeline stage). The source sends those boxes and nothing else.

Rules kept here:

- every element that a rank keeps is sent to it exactly once: its parts of a tensor do not overlap,
  and a part that it keeps under several names (tied weights) is sent once, with aliases;
- the ranks of an engine together keep every element, or somebody's report is missing;
- the same elements make the same parts: neighbours are joined, and what is large then is cut, so
  that a part lies beside the tensor that it is put together in without doubling the memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.errors import (
    LayoutError,
    PartOutOfBounds,
    PartsOverlap,
    TensorNotCovered,
    UnknownTensor,
)

PART_BYTES: Final = 64 * 1024 * 1024
"""A part that is not the whole tensor is cut, by its first dimension, to be no larger."""


class Box(Struct, frozen=True, array_like=True, gc=False):
    """A box of elements of a tensor: in dimension d, `sizes[d]` elements from `starts[d]` on."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements lie in it."""
        return math.prod(self.sizes)


class Part(Struct, frozen=True, array_like=True, gc=False):
    """What a rank keeps of the tensor that it knows as `name` (a first name or an alias)."""

    name: str
    box: Box


class SentPart(Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a rank's stream: a box of a source tensor.

    Attributes:
        source: First name of the source tensor.
        box: The elements that are sent, as a contiguous tensor in row-major order.
        spec: What arrives. Its name is the rank's name of the tensor, followed by the box when
            that is not the whole tensor, so that two sides which cut differently disagree.
    """

    source: str
    box: Box
    spec: TensorSpec


SentBytes = tuple[tuple[int, ...], ...]
"""Of each tensor of which a rank is sent something, in stream order, the bytes of each part."""


def whole(spec: TensorSpec) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(spec.shape), spec.shape)


def slice_of(spec: TensorSpec, dimension: int, start: int, size: int) -> Box:
    """`size` elements from `start` on in one dimension, and all in the others."""
    starts, sizes = [0] * len(spec.shape), list(spec.shape)
    starts[dimension], sizes[dimension] = start, size
    return Box(tuple(starts), tuple(sizes))


def part_name(name: str, spec: TensorSpec, box: Box) -> str:
    """The name of a part in a stream: `name` for a whole tensor, else `name[0:8,16:32]`."""
    if box == whole(spec):
        return name
    ranges = (f"{start}:{start + size}" for start, size in zip(box.starts, box.sizes, strict=True))
    return f"{name}[{','.join(ranges)}]"


def parts_of(spec: TensorSpec, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The parts that a rank makes of the boxes that it keeps of a tensor, in order."""
    together = tuple(boxes)
    if len(together) != 1 or not together[0].elements:
        together = joined(together)
    if together == (whole(spec),):
        return together
    item_bytes = DTYPE_BYTES.get(spec.dtype, 1)
    return tuple(piece for box in together for piece in _cut(box, item_bytes))


def joined(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same elements in fewer boxes, in order; empty boxes are left out.

    Boxes that differ in one dimension only, and touch or overlap there, become one; the innermost
    dimension is joined first.
    """
    left = [box for box in boxes if box.elements]
    dimensions = len(left[0].starts) if left else 0
    for dimension in reversed(range(dimensions)):
        left = _joined_along(left, dimension)
    return tuple(sorted(set(left), key=_in_order))


def layout_digest(layout: Sequence[Part]) -> str:
    """SHA-256 of a layout, in hexadecimal, over the one MessagePack form that its parts have."""
    return hashlib.sha256(msgspec.msgpack.encode(layout)).hexdigest()


def plan_parts(
    specs: Sequence[TensorSpec], layout: Iterable[Part], *, rank: int
) -> Result[tuple[SentPart, ...], LayoutError]:
    """What one rank is sent, in stream order.

    Args:
        specs: The source's tensors in stream order.
        layout: The parts that the rank keeps, in any order. Parts without elements are legal.
        rank: Its rank among the rollout workers, for the error.
    """
    kept = _kept(_by_name(specs), layout, rank)
    if not is_successful(kept):
        return Failure(kept.failure())
    return Success(
        tuple(
            _sent_part(spec, box, boxes[box])
            for spec, boxes in kept.unwrap()
            for box in sorted(boxes, key=_in_order)
        )
    )


def sent_bytes(
    specs: Sequence[TensorSpec], layouts: Iterable[tuple[int, Iterable[Part]]]
) -> Result[tuple[SentBytes, ...], LayoutError]:
    """For each layout, how many bytes each part has that `plan_parts` makes of it.

    Layouts with the same differ in the places of their parts in the tensors only: the same buckets
    move.

    Args:
        specs: The source's tensors in stream order.
        layouts: Each with the rank of one who keeps it, for the error.
    """
    by_name = _by_name(specs)
    sizes: list[SentBytes] = []
    for rank, layout in layouts:
        kept = _kept(by_name, layout, rank)
        if not is_successful(kept):
            return Failure(kept.failure())
        sizes.append(
            tuple(
                tuple(
                    box.elements * DTYPE_BYTES.get(spec.dtype, 1)
                    for box in sorted(boxes, key=_in_order)
                )
                for spec, boxes in kept.unwrap()
            )
        )
    return Success(tuple(sizes))


def check_coverage(
    specs: Sequence[TensorSpec], layouts: Iterable[Iterable[Part]]
) -> TensorNotCovered | None:
    """What part of a model no rank of an engine keeps, or None.

    Args:
        specs: The source's tensors. One name of a tied tensor is enough.
        layouts: The parts of every rank of one engine, which `plan_parts` finds nothing wrong with.
    """
    by_name = _by_name(specs)
    held: dict[str, set[Box]] = {spec.name: set() for spec in specs}
    for layout in layouts:
        for part in layout:
            held[by_name[part.name][1].name].add(part.box)
    # Many tensors are cut alike.
    union_of: dict[frozenset[Box], int] = {}
    for spec in specs:
        elements = math.prod(spec.shape)
        boxes = frozenset(held[spec.name])
        if whole(spec) in boxes:
            continue
        covered = union_of.get(boxes)
        if covered is None:
            covered = union_of[boxes] = union_elements(joined(boxes))
        if covered != elements or not boxes:
            return TensorNotCovered(tensor=spec.name, elements=elements, held=covered)
    return None


_ByName = dict[str, tuple[int, TensorSpec]]
"""Each tensor and its place in the stream, by every name that it has."""
_Kept = list[tuple[TensorSpec, dict[Box, list[str]]]]
"""Source tensors in stream order; of each the boxes that a rank keeps, and under which names."""


def _by_name(specs: Sequence[TensorSpec]) -> _ByName:
    return {name: (index, spec) for index, spec in enumerate(specs) for name in spec.names}


def _kept(by_name: _ByName, layout: Iterable[Part], rank: int) -> Result[_Kept, LayoutError]:
    wanted: dict[int, tuple[TensorSpec, dict[Box, list[str]]]] = {}
    for part in layout:
        name, box = part.name, part.box
        found = by_name.get(name)
        if found is None:
            return Failure(UnknownTensor(rank=rank, tensor=name))
        index, spec = found
        if not _lies_in(box, spec.shape):
            return Failure(
                PartOutOfBounds(
                    rank=rank, tensor=name, starts=box.starts, sizes=box.sizes, shape=spec.shape
                )
            )
        names = wanted.setdefault(index, (spec, {}))[1].setdefault(box, [])
        if name in names:
            return Failure(PartsOverlap(rank=rank, tensor=name))
        names.append(name)
    kept = [wanted[index] for index in sorted(wanted)]
    for spec, boxes in kept:
        overlapping = _overlapping_name(spec, boxes)
        if overlapping is not None:
            return Failure(PartsOverlap(rank=rank, tensor=overlapping))
    return Success(kept)


def _lies_in(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.starts) == len(box.sizes) == len(shape) and all(
        start >= 0 and size >= 0 and start + size <= length
        for start, size, length in zip(box.starts, box.sizes, shape, strict=True)
    )


def _overlapping_name(spec: TensorSpec, boxes: dict[Box, list[str]]) -> str | None:
    """A name under which two of a rank's boxes share elements."""
    if len(boxes) < 2:
        return None
    for name in spec.names:
        own = [box for box, names in boxes.items() if name in names]
        if union_elements(own) != sum(box.elements for box in own):
            return name
    return None


def union_elements(boxes: Sequence[Box]) -> int:
    """How many elements lie in at least one of the boxes, which have equally many dimensions."""
    if len(boxes) < 2:
        return sum(box.elements for box in boxes)
    if not boxes[0].starts:
        return 1
    begins: dict[int, list[Box]] = {}
    ends: dict[int, list[Box]] = {}
    for box in boxes:
        inner = Box(box.starts[1:], box.sizes[1:])
        begins.setdefault(box.starts[0], []).append(inner)
        ends.setdefault(box.starts[0] + box.sizes[0], []).append(inner)
    # Between two edges the same boxes lie; one edge after the other, they change.
    there: dict[Box, int] = {}
    elements = last = 0
    for edge in sorted(begins.keys() | ends.keys()):
        if there:
            elements += (edge - last) * union_elements(list(there))
        last = edge
        for inner in begins.get(edge, ()):
            there[inner] = there.get(inner, 0) + 1
        for inner in ends.get(edge, ()):
            there[inner] -= 1
            if not there[inner]:
                del there[inner]
    return elements


def _joined_along(boxes: Iterable[Box], dimension: int) -> list[Box]:
    """Joins the boxes that differ in one dimension only."""
    lines: dict[Box, list[tuple[int, int]]] = {}
    for box in sorted(boxes, key=lambda each: each.starts[dimension]):
        start, end = box.starts[dimension], box.starts[dimension] + box.sizes[dimension]
        line = lines.setdefault(_along(box, dimension, 0, 0), [])
        if line and line[-1][1] >= start:
            line[-1] = (line[-1][0], max(end, line[-1][1]))
        else:
            line.append((start, end))
    return [
        _along(rest, dimension, start, end - start)
        for rest, line in lines.items()
        for start, end in line
    ]


def _cut(box: Box, item_bytes: int) -> Iterator[Box]:
    """Slices along the first dimension of at most `PART_BYTES`, if one row is no larger."""
    if box.elements * item_bytes <= PART_BYTES:
        yield box
        return
    rows = max(1, PART_BYTES // (box.elements // box.sizes[0] * item_bytes))
    for first in range(0, box.sizes[0], rows):
        yield _along(box, 0, box.starts[0] + first, min(rows, box.sizes[0] - first))


def _along(box: Box, dimension: int, start: int, size: int) -> Box:
    """The box with another extent in one dimension."""
    starts, sizes = list(box.starts), list(box.sizes)
    starts[dimension], sizes[dimension] = start, size
    return Box(tuple(starts), tuple(sizes))


def _in_order(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.starts, box.sizes


def _sent_part(spec: TensorSpec, box: Box, names: Sequence[str]) -> SentPart:
    ordered = [name for name in spec.names if name in names]
    first, *aliases = (part_name(name, spec, box) for name in ordered)
    return SentPart(
        source=spec.name,
        box=box,
        spec=TensorSpec(first, box.sizes, spec.dtype, tuple(aliases)),
    )
