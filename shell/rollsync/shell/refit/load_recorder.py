"""Watches a model's own loader once, and learns which bytes of each tensor it writes where.

The loader runs as always, inside a torch dispatch mode that sees every operation. Memory is told
apart by its storage: a received tensor's (a source); a parameter's, or a buffer's, that serves; a
stand-in's, which is a tensor on the meta device without elements; and any other's that got
something of a source (scratch). An example is how vLLM reloads a layer whose `qk.weight` [6, 4]
gets the rows of `q` [4, 4] and of `k` [2, 4]:

1. The reload begins: the layer has a stand-in in its parameter's place, which `stand_in` is told.
2. `q` comes in a batch, a source from now on. The loader copies it to rows 0 to 3 of the stand-in,
   so as to count what the layer has got: that is noted as a copy to these rows of `qk.weight`, with
   the checksum of its bytes, and all of `q` as read. `q` is kept, or its clone when the batch's
   memory is used again, until the layer has everything.
3. `k` comes and is copied to rows 4 and 5 of the stand-in. Now the layer is whole: the loader makes
   scratch [6, 4], loads `q` and `k` into it once more, and processes the layer, which here does
   nothing to it.
4. The scratch is copied to the parameter that serves: it is settled. What was written to it has to
   be what was noted of the stand-in, and nothing else may have been done with it.
5. `plan` compares the bytes of `qk.weight` with the checksums, and answers that `q` is its rows 0
   to 3, and `k` its rows 4 and 5.

A loader that copies a source straight to what serves, as one of a plain torch module does, is seen
to do so in step 2, and there are no others.

Rules kept here: what is not seen to be a plain copy is a problem of the tensor or parameter it
touches, and `plan_load` decides what follows; all that an operation is given of a received tensor
counts as read, or the rows where it takes rows by their numbers; nothing is kept alive by being
watched; and a copy that was seen has to be found again, by its checksum, in the serving memory
after the load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.kept import box_of_view
from rollsync.pure.refit.layout import Box, whole
from rollsync.pure.refit.load_plan import (
    Copy,
    LoadPlan,
    Region,
    SeenParameter,
    SeenTensor,
    plan_load,
    region_of,
)
from rollsync.shell.refit.boxes import bytes_of
from rollsync.shell.refit.operations import rows_taken, tensors_in, watched
from rollsync.shell.refit.weights import dtype_name

_aten = torch.ops.aten
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


def serving_tensors(model: torch.nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    """Every parameter and buffer of a model by its names, with the module that has it."""
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found[name] = (name.rpartition(".")[0], tensor)
    return found


@dataclass
class _Source:
    """A received tensor."""

    spec: TensorSpec
    offset: int
    """Its first byte in its storage."""
    item_bytes: int
    copies: list[Copy] = field(default_factory=list)
    checksums: list[str] = field(default_factory=list)
    """Of each copy's bytes."""
    reads: dict[Box, None] = field(default_factory=dict)
    """What was read of it, in any way."""
    problem: str = ""


@dataclass
class _Serving:
    """A parameter, or buffer, that serves."""

    name: str
    layer: str
    tensor: torch.Tensor
    problem: str = ""
    constants: list[Region] = field(default_factory=list)
    written: list[Region] = field(default_factory=list)
    """What was copied into it, or into its stand-in on the meta device."""
    names: set[str] = field(default_factory=set)
    """Whose bytes these were."""
    has_stand_in: bool = False
    """Whether the loader fills a stand-in first, and this at its end."""
    is_settled: bool = False
    """Whether it has got what its stand-in had."""


@dataclass
class _Scratch:
    """Memory that was not known beforehand and got something of a source."""

    written: list[Region] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """The sources, as far as they were seen to be."""
    problem: str = ""
    is_settled: bool = False
    """Whether it was copied to what serves."""


class LoadRecorder:
    """Watches one load, from the first batch to the last.

    Args:
        serving: the model's parameters and buffers by their names, with the names of the layers
            that are loaded at once. A tensor that has several names is taken under its first.
        about: the received tensors of which something is to be learned: batches without any of
            these are not watched, which costs nothing. None: all are.
    """

    def __init__(
        self,
        serving: Mapping[str, tuple[str, torch.Tensor]],
        *,
        about: Set[str] | None = None,
    ) -> None:
        self._about = about
        self.tied: set[str] = set()
        """Names that came with the very bytes of another one, and count as that one's."""
        self._sources: dict[str, _Source] = {}
        self._scratch: dict[int, _Scratch] = {}
        self._serving: dict[int, _Serving] = {}
        self._by_name: dict[str, _Serving] = {}
        self._batch: dict[int, list[tuple[int, int, str]]] = {}
        # An address is not given to new memory while a weak reference to the old one is held.
        self._references: dict[int, StorageWeakRef] = {}
        for name, (layer, tensor) in serving.items():
            self._serve(name, layer, tensor)

    def stand_in(self, name: str, meta: torch.Tensor) -> None:
        """Tells that the loader writes to `meta` first what becomes the parameter `name`."""
        known = self._by_name.get(name)
        if known is None or meta.device.type != "meta":
            return
        if (meta.shape, meta.stride(), meta.dtype) != (
            known.tensor.shape,
            known.tensor.stride(),
            known.tensor.dtype,
        ):
            known.problem = "it serves in another form than it is loaded in"
        known.has_stand_in = True
        self._serving[self._key(meta)] = known

    def refuse(self, layer: str, problem: str) -> None:
        """Tells that something of a layer follows from its weights that may not be seen here."""
        for each in self._by_name.values():
            if each.layer == layer:
                each.problem = each.problem or problem

    @contextlib.contextmanager
    def loading(self, batch: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Watches what happens while the loader has this batch, and while it finishes with ()."""
        if self._about is not None and not any(name in self._about for name, _ in batch):
            yield
            return
        for name, tensor in batch:
            self._receive(name, tensor)
        with watched(self._see, self._see_call):
            yield
        self._batch = {}

    def plan(self, now: Callable[[str], torch.Tensor | None]) -> LoadPlan:
        """What was learned, once the load is finished.

        Args:
            now: the model's parameter or buffer of a name, as it is now.
        """
        for each in self._by_name.values():
            self._check_serving(each, now(each.name))
        for scratch in self._scratch.values():
            for name in () if self._is_explained(scratch) else scratch.names:
                _blame(self._sources[name], "it is kept somewhere else too")
        for source in self._sources.values():
            self._check_contents(source)
        return plan_load(
            {
                name: SeenTensor(each.spec, tuple(each.copies), each.problem, tuple(each.reads))
                for name, each in self._sources.items()
            },
            {
                name: SeenParameter(
                    each.layer, each.tensor.nbytes, tuple(each.constants), each.problem
                )
                for name, each in self._by_name.items()
            },
        )

    def _serve(self, name: str, layer: str, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        known = self._serving.get(key)
        if known is None:
            made = self._serving[key] = self._by_name[name] = _Serving(name, layer, tensor.detach())
            if not tensor.is_contiguous() or tensor.storage_offset():
                made.problem = "its memory has gaps or another order, or is part of another's"
        elif known.tensor.data_ptr() != tensor.data_ptr() or known.tensor.shape != tensor.shape:
            known.problem = f"it shares memory with {name}"

    def _receive(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._sources:
            _blame(self._sources[name], "it was loaded twice")
            _read_whole(self._sources[name])
            return
        source = _Source(
            TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype)),
            int(tensor.storage_offset()) * tensor.itemsize,
            tensor.itemsize,
        )
        if not tensor.nbytes:
            source.problem = "it has no bytes"
        elif not tensor.is_contiguous():
            source.problem = "it came in another order than it is sent in"
            _read_whole(source)
        held = self._batch.setdefault(self._key(tensor), [])
        same = (source.offset, source.offset + tensor.nbytes)
        if any((start, end) == same for start, end, _ in held):
            # A further name of a tied weight: whatever is done with it is done with the first.
            self.tied.add(name)
            return
        self._sources[name] = source
        held.append((*same, name))

    def _see(self, func: torch._ops.OpOverload, arguments: object, answer: object) -> None:
        """One operation, already done."""
        tensors = tensors_in(arguments)
        if self._gave_views(func, tensors, answer):
            return
        rows = rows_taken(func, arguments)
        for each in tensors if rows is None else rows:
            self._see_read(each)
        if func is _aten.copy_.default and len(tensors) == 2:
            self._see_copy(*tensors)
        elif func in _FILLS:
            self._see_fill(tensors[0])
            for each in tensors[1:]:
                self._see_use(each, str(func))
        else:
            for each in tensors:
                self._see_use(each, str(func))

    def _see_call(self, func: object, arguments: object) -> None:
        """One call of an operator that torch itself does not bring, about to be made.

        Some are registered so that the dispatch mode does not see them.
        """
        for each in tensors_in(arguments):
            self._see_read(each)
            self._see_use(each, str(func))

    def _see_read(self, tensor: torch.Tensor) -> None:
        name, first_byte, _ = self._owner(tensor)
        if not name:
            return
        source = self._sources[name]
        offset = int(tensor.storage_offset()) * tensor.itemsize - first_byte
        shape, item_bytes = source.spec.shape, source.item_bytes
        box = None
        if tensor.layout == torch.strided and tensor.itemsize == item_bytes:
            box = box_of_view(offset // item_bytes, tensor.shape, tensor.stride(), shape)
        source.reads[whole(source.spec) if box is None else box] = None

    def _see_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.numel():
            return
        to, region = self._serving.get(self._key(target)), _region(target)
        name, part = self._part(source)
        if to is None:
            self._see_copy_to_scratch(target, region, source, name)
        elif name:
            self._see_copy_of_source(to, target, region, source, name, part)
        elif self._key(source) != self._key(target):
            self._see_settling(to, target, region, source)
        elif region != _region(source):
            to.problem = "parts of it are moved within it"

    def _see_copy_of_source(
        self,
        to: _Serving,
        target: torch.Tensor,
        region: Region | None,
        source: torch.Tensor,
        name: str,
        part: Region | None,
    ) -> None:
        if not _same_bytes(target, source) or region is None or part is None:
            problem = f"{name} is converted for {to.name}"
            _blame(self._sources[name], problem)
            to.problem = to.problem or problem
            return
        copy = Copy(part, to.name, region)
        seen = self._sources[name]
        if copy in seen.copies:
            # A loader that first counts what it will load does the same copies again.
            return
        seen.copies.append(copy)
        seen.checksums.append(_checksum(source))
        to.written.append(region)
        to.names.add(name)

    def _see_copy_to_scratch(
        self, target: torch.Tensor, region: Region | None, source: torch.Tensor, name: str
    ) -> None:
        scratch = self._scratch_of(target)
        if name:
            scratch.names.add(name)
        else:
            self._see_use(source, "a copy")
        if region is None or not _same_bytes(target, source):
            scratch.problem = "something is converted on its way there"
        else:
            scratch.written.append(region)

    def _see_settling(
        self, to: _Serving, target: torch.Tensor, region: Region | None, source: torch.Tensor
    ) -> None:
        """A copy into serving memory from memory that is no source's."""
        scratch = self._scratch.get(self._key(source))
        if not to.has_stand_in:
            # The same copy as before, but of what the loader has put aside in between.
            if scratch is not None or region not in to.written:
                to.problem = to.problem or "it gets something that was computed"
            return
        if scratch is None or self._serving.get(self._key(source)) is not None:
            to.problem = to.problem or "it gets something that was computed"
            return
        scratch.is_settled = True
        alike = _region(source) == region and _same_bytes(target, source)
        is_whole = region is not None and region.total_bytes == to.tensor.nbytes
        if scratch.problem or not alike or not is_whole:
            to.problem = to.problem or scratch.problem or "it is rearranged after it is loaded"
        if _ordered(scratch.written) != _ordered(to.written):
            to.problem = to.problem or "it is changed after it is loaded"
        to.is_settled = True

    def _see_fill(self, target: torch.Tensor) -> None:
        if not target.numel():
            return
        region = _region(target)
        to = self._serving.get(self._key(target))
        if to is None:
            return
        if region is None:
            to.problem = to.problem or "it is filled in another order"
        elif region not in to.constants:
            to.constants.append(region)

    def _see_use(self, tensor: torch.Tensor, by: str) -> None:
        key = self._key(tensor)
        serving, scratch = self._serving.get(key), self._scratch.get(key)
        name, _ = self._part(tensor)
        problem = f"{by} uses it"
        if name:
            _blame(self._sources[name], problem)
        if serving is not None:
            serving.problem = serving.problem or problem
        if scratch is not None:
            scratch.problem = scratch.problem or problem

    def _is_explained(self, scratch: _Scratch) -> bool:
        """Whether it was a parameter on its way, with nothing in it but what was counted before."""
        return scratch.is_settled or any(
            each.has_stand_in
            and scratch.names <= each.names
            and _ordered(scratch.written) == _ordered(each.written)
            for each in self._by_name.values()
        )

    def _check_serving(self, each: _Serving, now: torch.Tensor | None) -> None:
        seen = each.tensor
        if (
            now is None
            or now.data_ptr() != seen.data_ptr()
            or (now.shape, now.stride(), now.dtype) != (seen.shape, seen.stride(), seen.dtype)
        ):
            each.problem = each.problem or "its memory was replaced"
        elif each.has_stand_in and each.written and not each.is_settled:
            each.problem = each.problem or "it did not get what was loaded"

    def _check_contents(self, source: _Source) -> None:
        """Compares what came with what serves, byte for byte by checksum."""
        for copy, checksum in zip(source.copies, source.checksums, strict=True):
            to = self._by_name[copy.parameter]
            if not to.problem and _checksum(bytes_of(to.tensor, copy.target)) != checksum:
                to.problem = "it does not hold what was copied to it"

    def _part(self, tensor: torch.Tensor) -> tuple[str, Region | None]:
        """The received tensor whose bytes these are, and which of its bytes; "" for none's."""
        name, start, end = self._owner(tensor)
        region = _region(tensor, start) if name else None
        return name, region if region is not None and region.end <= end - start else None

    def _owner(self, tensor: torch.Tensor) -> tuple[str, int, int]:
        """The received tensor whose bytes these are, "" for none's, and where its own begin and end
        in their storage."""
        for start, end, name in self._batch.get(self._key(tensor), ()):
            first = int(tensor.storage_offset()) * tensor.itemsize
            if start <= first < end and tensor.numel():
                return name, start, end
        return "", 0, 0

    def _gave_views(
        self, func: torch._ops.OpOverload, tensors: Sequence[torch.Tensor], answer: object
    ) -> bool:
        """Whether an operation neither read nor wrote elements, and only gave views."""
        if not all(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns
        ):
            return False
        # Some, such as `reshape`, copy where no view is possible.
        given = {self._key(each) for each in tensors}
        views = tensors_in(answer)
        return bool(views) and all(self._key(each) in given for each in views)

    def _scratch_of(self, tensor: torch.Tensor) -> _Scratch:
        return self._scratch.setdefault(self._key(tensor), _Scratch())

    def _key(self, tensor: torch.Tensor) -> int:
        """Names the memory of a tensor."""
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        if key not in self._references:
            self._references[key] = StorageWeakRef(storage)
        return key


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy moves bytes as they are, element by element."""
    shapes = [[size for size in each.shape if size != 1] for each in (target, source)]
    return (
        target.dtype == source.dtype
        and shapes[0] == shapes[1]
        and not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg())
    )


def _region(tensor: torch.Tensor, base: int = 0) -> Region | None:
    """The bytes of a tensor in its storage, counted from `base`."""
    if tensor.layout != torch.strided:
        return None
    found = region_of(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.itemsize)
    if found is None:
        return None
    return Region(found.offset - base, found.run_bytes, found.runs, found.stride_bytes)


def _ordered(regions: Sequence[Region]) -> list[tuple[int, int, int, int]]:
    return sorted((each.offset, each.run_bytes, each.runs, each.stride_bytes) for each in regions)


def _checksum(tensor: torch.Tensor) -> str:
    """XXH3 of a tensor's contents in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    contents: memoryview = flat.cpu().numpy().data
    return xxhash.xxh3_64_hexdigest(contents)


def _read_whole(source: _Source) -> None:
    source.reads[whole(source.spec)] = None


def _blame(source: _Source, problem: str) -> None:
    source.problem = source.problem or problem
