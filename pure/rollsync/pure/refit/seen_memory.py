"""What was seen of one memory in a load: a received tensor, a parameter that serves, scratch; see
`rollsync.pure.refit.seen_load`, which finds out which of them an event is about.

Rule kept here: a problem once seen stays, and the first one is kept.
"""

from __future__ import annotations

from collections import Counter

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.kept import box_of_view
from rollsync.pure.refit.layout import Box, whole
from rollsync.pure.refit.load_events import Copied, Serves, View, are_same_bytes
from rollsync.pure.refit.load_plan import Copy, Region, SeenParameter, SeenTensor, are_covered


class Memory:
    """What the three kinds have in common: each may turn out to be no plain copy, or hold none."""

    def __init__(self) -> None:
        self.problem = ""

    def note_problem(self, problem: str) -> None:
        """Why it is none; the first reason is kept."""
        self.problem = self.problem or problem


class Source(Memory):
    """A received tensor: the bytes from `start` to `end` of its batch's memory."""

    def __init__(self, name: str, view: View) -> None:
        super().__init__()
        self.spec = TensorSpec(name, view.shape, view.dtype)
        self.start, self.end = view.offset_bytes, view.offset_bytes + view.total_bytes
        self.copies: dict[Copy, str] = {}
        """Those to what serves, with the checksum of each one's bytes."""
        self._item_bytes = view.item_bytes
        self._reads: dict[Box, None] = {}
        if not view.total_bytes:
            self.note_problem("it has no bytes")
        elif not view.is_contiguous:
            self.note_problem("it came in another order than it is sent in")
            self.read_whole()

    @property
    def name(self) -> str:
        """The name under which it came."""
        return self.spec.name

    def seen(self) -> SeenTensor:
        """What `plan_load` is told of it."""
        return SeenTensor(self.spec, tuple(self.copies), self.problem, tuple(self._reads))

    def has(self, view: View) -> bool:
        """Whether the elements of a view of the batch's memory are its own."""
        return self.start <= view.offset_bytes < self.end and view.total_bytes > 0

    def read(self, view: View) -> None:
        """A view of it was read."""
        box = None
        if view.item_bytes == self._item_bytes:
            offset = (view.offset_bytes - self.start) // self._item_bytes
            box = box_of_view(offset, view.shape, view.strides, self.spec.shape)
        self._reads[whole(self.spec) if box is None else box] = None

    def read_whole(self) -> None:
        """All of it was read."""
        self._reads[whole(self.spec)] = None

    def part(self, view: View) -> Region | None:
        """Which of its bytes a view has; None when that cannot be said."""
        region = view.region(self.start)
        return region if region is not None and region.end <= self.end - self.start else None


class Scratch(Memory):
    """Memory that was not known beforehand and got something of a source."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Region] = []
        self.names: set[str] = set()
        """The sources, as far as they were seen to be."""
        self.is_settled = False
        """Whether it was copied to what serves."""

    def copied(self, target: View, source: View, name: str) -> None:
        """It got something, of a received tensor if there is a name."""
        if name:
            self.names.add(name)
        region = target.region()
        if region is None or not are_same_bytes(target, source):
            self.note_problem("something is converted on its way there")
        else:
            self.written.append(region)


class Serving(Memory):
    """A parameter, or a buffer, that serves, together with its stand-in."""

    def __init__(self, event: Serves) -> None:
        super().__init__()
        self.name, self.layer, self.view = event.name, event.layer, event.view
        self._zeros: dict[Region, None] = {}
        self._written: list[Region] = []
        """What was copied into it, or into its stand-in."""
        self._names: set[str] = set()
        """Whose bytes these were."""
        self._has_stand_in = False
        """Whether the loader fills a stand-in first, and this at its end."""
        self._is_settled = False
        """Whether it has got what its stand-in had."""
        self._is_touched = False
        """Whether anything was done to it."""
        self._given_before = 0
        self._is_buffer = event.is_buffer
        self._views = [self.view]
        """Itself, and whatever else serves in its memory."""
        self._overwritten: list[Region] = []
        """What was seen to be written of itself, as opposed to a stand-in, by whatever."""
        self._is_changed = False
        """Whether it has other contents than before, if it is a buffer."""
        if not self.view.is_contiguous or self.view.offset_bytes:
            self.note_problem("its memory has gaps or another order, or is part of another's")

    def seen(self) -> SeenParameter:
        """What `plan_load` is told of it."""
        return SeenParameter(
            layer=self.layer,
            total_bytes=self.view.total_bytes,
            zeros=tuple(self._zeros),
            problem=self.problem if self._is_touched else "",
            given_before=self._given_before,
        )

    def shares(self, event: Serves) -> None:
        """Something else than it serves in its memory."""
        self.problem = f"it shares memory with {event.name}"
        self._views.append(event.view)
        self._is_buffer = self._is_buffer and event.is_buffer

    def touched(self, given_before: int) -> None:
        """Something was done to it.

        Args:
            given_before: how many tensors may have led to that; 0: it belongs to its layer, or is a
                copy of one of them.
        """
        self._is_touched = True
        self._given_before = max(self._given_before, given_before)

    def overwritten(self, target: View) -> None:
        """Something was written to it, or to its stand-in."""
        if target.memory != self.view.memory:
            return
        # All of it is, in whatever order its elements lie.
        is_all = target in self._views
        region = Region(target.offset_bytes, target.total_bytes) if is_all else target.region()
        if region is not None:
            self._overwritten.append(region)

    def changed(self) -> None:
        """It has other contents than before the load."""
        self._is_changed = True

    @property
    def is_explained(self) -> bool:
        """Whether nothing else can have been written to it than what was seen: all of a parameter
        is loaded, and a buffer may be."""
        return (self._is_buffer and not self._is_changed) or all(
            are_covered(self._overwritten, view.offset_bytes, view.total_bytes)
            for view in self._views
        )

    def stands_in(self, view: View) -> None:
        """The loader fills this memory first."""
        if not self._is_alike(view):
            self.note_problem("it serves in another form than it is loaded in")
        self._has_stand_in = True

    def copied(self, event: Copied, source: Source) -> None:
        """It, or its stand-in, got something of a received tensor."""
        region, part = event.target.region(), source.part(event.source)
        if not are_same_bytes(event.target, event.source) or region is None or part is None:
            problem = f"{source.name} is converted for {self.name}"
            source.note_problem(problem)
            self.note_problem(problem)
            return
        copy = Copy(part, self.name, region)
        # A loader that first counts what it will load does the same copies again.
        if copy not in source.copies:
            source.copies[copy] = event.checksum
            self._written.append(region)
            self._names.add(source.name)

    def filled(self, target: View, *, is_zero: bool) -> None:
        """All elements of a view of it became a constant."""
        region = target.region()
        if region is None:
            self.note_problem("it is filled in another order")
        elif not is_zero:
            self.note_problem("it is filled with something else than zeros")
        else:
            self._zeros[region] = None

    def settled(self, target: View, source: View, scratch: Scratch | None) -> None:
        """It got something that is no source's, but `scratch`'s if that is known."""
        region = target.region()
        if not self._has_stand_in:
            # The same copy as before, but of what the loader has put aside in between.
            if scratch is not None or region not in self._written:
                self.note_problem("it gets something that was computed")
            return
        if scratch is None:
            self.note_problem("it gets something that was computed")
            return
        scratch.is_settled = self._is_settled = True
        if scratch.problem:
            self.note_problem(scratch.problem)
        elif (
            region is None
            or region.total_bytes != self.view.total_bytes
            or region != source.region()
            or not are_same_bytes(target, source)
        ):
            self.note_problem("it is rearranged after it is loaded")
        if Counter(scratch.written) != Counter(self._written):
            self.note_problem("it is changed after it is loaded")

    def explains(self, scratch: Scratch) -> bool:
        """Whether the scratch has nothing in it but what was counted here before."""
        return (
            self._has_stand_in
            and scratch.names <= self._names
            and Counter(scratch.written) == Counter(self._written)
        )

    def found(self, view: View | None) -> None:
        """What it is after the load."""
        mine = (self.view.memory, self.view.offset_bytes)
        if view is None or (view.memory, view.offset_bytes) != mine or not self._is_alike(view):
            self.note_problem("its memory was replaced")
            self._is_changed |= view is not None and not self._has_stand_in
        elif self._has_stand_in and self._written and not self._is_settled:
            self.note_problem("it did not get what was loaded")

    def _is_alike(self, view: View) -> bool:
        mine = self.view
        return (view.shape, view.strides, view.dtype) == (mine.shape, mine.strides, mine.dtype)
