"""Which bytes of a received weight go where, learned from watching an engine's own loader once.

A loader may cut a tensor for its tensor-parallel rank, put several tensors into one parameter, pad,
or do something else entirely. What it did by plain copies can be done again without it, straight
from the sender's memory; `plan_load` says which of the received tensors that holds for.

Rules kept here:

- a tensor is direct only when everything that the loader read of it was copied, byte for byte,
  into parameters that serve, and when all other bytes of those parameters are accounted for too;
- a layer is taken as a whole: when one of its parameters is not filled by copies alone, the tensors
  of the whole layer stay with the loader, as a loader finishes layers and not parameters;
- what a loader does of itself to such a parameter (it computes, counts, moves on what serves) it
  does again, as it is given all tensors again that it had been given by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.layout import Box, whole


class Region(Struct, frozen=True, array_like=True, gc=False):
    """Bytes of a tensor's memory, in an order: equally long runs at equal distances.

    Attributes:
        offset: The first byte of the first run.
        run_bytes: Bytes of one run.
        runs: How many runs.
        stride_bytes: From the start of a run to that of the next; 0 when there is one run only.
    """

    offset: int
    run_bytes: int
    runs: int = 1
    stride_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes in all runs."""
        return self.run_bytes * self.runs

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.offset + (self.runs - 1) * self.stride_bytes + self.run_bytes

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Start and end of each run."""
        for run in range(self.runs):
            start = self.offset + run * self.stride_bytes
            yield start, start + self.run_bytes


class Copy(Struct, frozen=True, array_like=True, gc=False):
    """The bytes of `source`, in their order, become those of `target`, in theirs.

    Attributes:
        source: Part of the received tensor's contents in row-major order.
        parameter: The name of the parameter that is written.
        target: Part of that parameter's memory.
    """

    source: Region
    parameter: str
    target: Region


class SeenTensor(Struct, frozen=True):
    """A tensor that the loader was given.

    Attributes:
        spec: What it is.
        copies: What was copied of it by plain copies, in order.
        problem: What else was done with it, in words; empty when nothing was.
        reads: Boxes that hold all that was read of it, in whatever way.
    """

    spec: TensorSpec
    copies: tuple[Copy, ...] = ()
    problem: str = ""
    reads: tuple[Box, ...] = ()


class SeenParameter(Struct, frozen=True):
    """A parameter, or a buffer, that serves.

    Attributes:
        layer: The part of the model that the loader finishes at once.
        total_bytes: Bytes of its memory, which has no gaps.
        zeros: What the loader filled with zeros, such as padding.
        problem: Why its bytes are not simply those that were copied; empty when they are.
        given_before: How many tensors the loader had been given when it last did something to it
            that is no copy of one of them: any of these may have led to that. 0: it never did, or
            does so for the whole layer.
    """

    layer: str
    total_bytes: int
    zeros: tuple[Region, ...] = ()
    problem: str = ""
    given_before: int = 0


class PlannedTensor(Struct, frozen=True):
    """What becomes of one received tensor.

    Attributes:
        spec: What it is.
        copies: The copies that make it up; nothing else of it is needed. Without any, nothing of
            it is.
        reads: Boxes that hold all that the loader reads of it.
        staged_because: Why the loader has to load it; empty when the copies can be done without.
    """

    spec: TensorSpec
    copies: tuple[Copy, ...]
    reads: tuple[Box, ...]
    staged_because: str

    @property
    def is_direct(self) -> bool:
        """Whether the copies alone, done without the loader, have its effect."""
        return not self.staged_because


class LoadPlan(Struct, frozen=True):
    """What a rank's loader does with each tensor of a stream; `LoadPlan()` when nothing is known.

    Attributes:
        tensors: By name, in stream order.
        layers: Those that are filled by direct tensors alone, and zeros; a loader may leave them
            out.
        tied: Names that came with the very bytes of another one, and count as that one's.
        zeros: What is to be filled with zeros of the parameters of these layers.
    """

    tensors: dict[str, PlannedTensor] = {}
    layers: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    zeros: tuple[tuple[str, Region], ...] = ()

    @property
    def direct(self) -> dict[str, PlannedTensor]:
        """The tensors that need no loader."""
        return {name: each for name, each in self.tensors.items() if each.is_direct}

    @property
    def direct_bytes(self) -> int:
        """Bytes that are copied without the loader."""
        return sum(copy.target.total_bytes for each in self.direct.values() for copy in each.copies)


def plan_load(
    tensors: Mapping[str, SeenTensor], parameters: Mapping[str, SeenParameter]
) -> LoadPlan:
    """The plan that follows from one load that was watched from its start to its end.

    Args:
        tensors: Everything that the loader was given, by name, in stream order.
        parameters: Every parameter to which something was done, and may be others, by name.
    """
    unplain = {name: _problem_of_tensor(each, parameters) for name, each in tensors.items()}
    written = _written(tensors)
    spoiled = {
        parameter.layer: f"parameter {name}: {problem}"
        for name, parameter in parameters.items()
        for problem in [_problem_of_parameter(parameter, written.get(name, ()))]
        if problem
    }
    staged = {name: problem for name, problem in unplain.items() if problem}
    _spread(tensors, parameters, staged, spoiled)
    filled = {parameters[name].layer for name in written if name in parameters}
    layers = frozenset(filled - set(spoiled))
    return LoadPlan(
        tensors={
            name: PlannedTensor(
                spec=each.spec,
                copies=() if unplain[name] else each.copies,
                # What is loaded without being read still has to come.
                reads=each.reads or ((whole(each.spec),) if name in staged else ()),
                staged_because=staged.get(name, ""),
            )
            for name, each in tensors.items()
        },
        layers=layers,
        zeros=tuple(
            (name, region)
            for name, parameter in parameters.items()
            if parameter.layer in layers
            for region in parameter.zeros
        ),
    )


def are_covered(regions: Iterable[Region], first: int, total_bytes: int) -> bool:
    """Whether the regions have every one of so many bytes, some perhaps more than once.

    Args:
        regions: The regions.
        first: The first of the bytes.
        total_bytes: How many there are.
    """
    position = first
    for start, end in sorted(each for region in _joined(regions) for each in region.intervals()):
        if start > position:
            break
        position = max(position, end)
    return position >= first + total_bytes


def covered_once(regions: Iterable[Region], total_bytes: int) -> bool:
    """Whether the regions have every byte from 0 to `total_bytes` exactly once."""
    position = 0
    for start, end in sorted(each for region in _joined(regions) for each in region.intervals()):
        if start != position:
            return False
        position = end
    return position == total_bytes


def region_of(
    offset: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int
) -> Region | None:
    """The memory of a strided view, in the order of its elements; None if it is no `Region`.

    Args:
        offset: Of the view's first element in the memory, in elements.
        shape: Elements in each dimension.
        strides: Elements from one to the next in each dimension.
        item_bytes: Size of an element.
    """
    if 0 in shape:
        return Region(0, 0)
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    run = 1
    if merged and merged[-1][1] == 1:
        run = merged.pop()[0]
    if len(merged) > 1 or (merged and merged[0][1] < run):
        return None
    runs, stride = merged[0] if merged else (1, 0)
    return Region(offset * item_bytes, run * item_bytes, runs, stride * item_bytes)


def _joined(regions: Iterable[Region]) -> Iterator[Region]:
    """The regions, those without gaps as one run, and without the empty ones."""
    for each in regions:
        if each.runs > 1 and each.stride_bytes == each.run_bytes:
            yield Region(each.offset, each.total_bytes)
        elif each.total_bytes:
            yield each


def _written(tensors: Mapping[str, SeenTensor]) -> dict[str, list[Copy]]:
    """All copies, by the parameter that they write."""
    written: dict[str, list[Copy]] = {}
    for tensor in tensors.values():
        for copy in tensor.copies:
            written.setdefault(copy.parameter, []).append(copy)
    return written


def _problem_of_tensor(tensor: SeenTensor, parameters: Mapping[str, SeenParameter]) -> str:
    if tensor.problem:
        return tensor.problem
    if tensor.spec.dtype not in DTYPE_BYTES:
        return f"its dtype {tensor.spec.dtype} is unknown"
    for copy in tensor.copies:
        if copy.parameter not in parameters:
            return f"it is copied to {copy.parameter}, which does not serve"
        if copy.source.total_bytes != copy.target.total_bytes:
            return f"its bytes are not those that {copy.parameter} got"
        if copy.source.offset < 0 or copy.source.end > tensor.spec.tensor_bytes:
            return "more is copied of it than it has"
    return ""


def _problem_of_parameter(parameter: SeenParameter, copies: Sequence[Copy]) -> str:
    if parameter.problem:
        return parameter.problem
    if not copies:
        return "the loader changes it of itself" if parameter.given_before else ""
    regions = [copy.target for copy in copies]
    if not covered_once((*regions, *parameter.zeros), parameter.total_bytes):
        return "not every byte of it is copied exactly once"
    return ""


def _spread(
    tensors: Mapping[str, SeenTensor],
    parameters: Mapping[str, SeenParameter],
    staged: dict[str, str],
    spoiled: dict[str, str],
) -> None:
    """A staged tensor spoils the layers it goes to, and a spoiled layer stages its tensors, and
    those that may have led to what was done to it."""
    touched = {
        name: {parameters[c.parameter].layer for c in each.copies if c.parameter in parameters}
        for name, each in tensors.items()
    }
    behind: dict[str, int] = {}
    for parameter in parameters.values():
        behind[parameter.layer] = max(behind.get(parameter.layer, 0), parameter.given_before)
    growing = True
    while growing:
        growing = False
        most = max(spoiled, key=lambda layer: behind[layer], default=None)
        for number, (name, layers) in enumerate(touched.items()):
            if name in staged:
                new = layers - spoiled.keys()
                spoiled.update(dict.fromkeys(new, f"{name} is loaded: {staged[name]}"))
                growing = growing or bool(new)
            else:
                cause = next((spoiled[layer] for layer in sorted(layers) if layer in spoiled), "")
                if not cause and most is not None and number < behind[most]:
                    cause = f"it may have led to something: {spoiled[most]}"
                if cause:
                    staged[name] = cause
                    growing = True
