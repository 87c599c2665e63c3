"""What is written down of one load while an engine's own loader does it: which memory it was given,
and each thing that it did with that. `rollsync.pure.refit.seen_load` says what follows.

Rule kept here: an event says what happened and to which memory, in the order in which it happened,
and nothing of what that means; a memory keeps its number while the events are written.
"""

from __future__ import annotations

import math

from msgspec import Struct

from rollsync.pure.refit.load_plan import Region, region_of


class View(Struct, frozen=True, array_like=True, gc=False):
    """What a tensor is of the memory that it lies in.

    Attributes:
        memory: The number of that memory; a tensor and all views of it have the same.
        offset_bytes: Of its first element in the memory.
        shape: Elements in each dimension.
        strides: Elements from one to the next in each dimension.
        dtype: The element type by torch's name.
        item_bytes: Size of an element.
        is_plain: False when its elements are others than those in the memory: conjugated, negated.
    """

    memory: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    is_plain: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        region = self.region()
        return region is not None and region.runs == 1

    def region(self, base: int = 0) -> Region | None:
        """Its bytes, in the order of its elements, counted from byte `base` of the memory; None if
        they are no `Region`."""
        found = region_of(0, self.shape, self.strides, self.item_bytes)
        if found is None:
            return None
        start = self.offset_bytes - base
        return Region(start + found.offset, found.run_bytes, found.runs, found.stride_bytes)


def are_same_bytes(target: View, source: View) -> bool:
    """Whether a copy from one to the other moves bytes as they are, element by element."""
    return (
        target.dtype == source.dtype
        and target.is_plain
        and source.is_plain
        and [size for size in target.shape if size != 1]
        == [size for size in source.shape if size != 1]
    )


class Serves(Struct, frozen=True):
    """Before the load: a parameter, or a buffer, that serves, of a layer that is loaded at once."""

    name: str
    layer: str
    view: View
    is_buffer: bool = False


class StandsIn(Struct, frozen=True):
    """The loader writes to this memory, which has no elements, what becomes the parameter."""

    name: str
    view: View


class Processed(Struct, frozen=True):
    """Something of a layer follows from its weights that may not be seen here."""

    layer: str
    problem: str


class Received(Struct, frozen=True, gc=False):
    """The loader is given a tensor, which it has until the batch is over."""

    name: str
    view: View


class BatchEnded(Struct, frozen=True):
    """The loader has done what it does with a batch; the memory of its tensors may be others'."""


class Copied(Struct, frozen=True, gc=False):
    """The elements of one tensor became those of another.

    Attributes:
        target: What was written.
        source: What was read.
        checksum: Of the bytes of `source` in row-major order, when that is of a received tensor and
            `target` of what serves, or stands in, and they are the same bytes; else empty.
    """

    target: View
    source: View
    checksum: str = ""


class Filled(Struct, frozen=True, gc=False):
    """All elements of a tensor became the same constant.

    Attributes:
        target: What was written.
        is_zero: Whether all its bytes are 0 now.
    """

    target: View
    is_zero: bool


class Used(Struct, frozen=True, gc=False):
    """Something else was done with tensors: they were read, written, or given away.

    Attributes:
        by: The operation.
        views: The tensors.
        read: What was read of them.
    """

    by: str
    views: tuple[View, ...]
    read: tuple[View, ...]


class Found(Struct, frozen=True):
    """After the load: what the parameter, or buffer, is now; None: there is none of that name."""

    name: str
    view: View | None


class Changed(Struct, frozen=True):
    """After the load: a buffer's contents are not what they were before."""

    name: str


LoadEvent = (
    Serves | StandsIn | Processed | Received | BatchEnded | Copied | Filled | Used | Found | Changed
)
