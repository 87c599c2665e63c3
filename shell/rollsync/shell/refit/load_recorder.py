"""Watches a model's own loader in one load, and writes down what it does with each tensor.

The loader runs as always, inside a torch dispatch mode that sees every operation. Each becomes an
event (`rollsync.pure.refit.load_events`), and `rollsync.pure.refit.seen_load` says what they mean.

Rules kept here: all operations are written down, with the memory that they were given; nothing is
kept alive by being watched; and the bytes of a copy are taken a checksum of while they are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from rollsync.pure.refit.load_events import (
    BatchEnded,
    Changed,
    Copied,
    Filled,
    Found,
    LoadEvent,
    Processed,
    Received,
    Serves,
    StandsIn,
    Used,
    View,
    are_same_bytes,
)
from rollsync.pure.refit.load_plan import LoadPlan
from rollsync.pure.refit.seen_load import plan_seen, seen_load
from rollsync.shell.refit.boxes import bytes_of
from rollsync.shell.refit.operations import gave_views, rows_taken, tensors_in, watched
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


class LoadRecorder:
    """Watches one load, from the first batch to the last.

    Args:
        serving: the model's parameters and buffers by their names, with the names of the layers
            that are loaded at once. A tensor that has several names is taken under its first.
        about: the received tensors of which something is to be learned: batches without any of
            these are not watched, nor is the finish, which costs nothing. None: all are.
    """

    def __init__(
        self,
        serving: Mapping[str, tuple[str, torch.Tensor]],
        *,
        about: Set[str] | None = None,
    ) -> None:
        self._about = about
        self._events: list[LoadEvent] = []
        self._targets: set[int] = set()
        """The memories of what serves, and of what stands in."""
        self._received: set[int] = set()
        """Those of the batch that the loader has."""
        # An address is not given to new memory while a weak reference to the old one is held.
        self._references: dict[int, StorageWeakRef] = {}
        self._serving = {name: tensor.detach() for name, (_, tensor) in serving.items()}
        self._buffers: dict[str, str] = {}
        """The checksums of what they hold before the load."""
        for name, (layer, tensor) in serving.items():
            is_buffer = not isinstance(tensor, torch.nn.Parameter)
            view = self._view(tensor)
            is_readable = view.is_plain and not tensor.is_meta
            if about is None and is_buffer and is_readable and view.memory not in self._targets:
                self._buffers[name] = _checksum(tensor)
            self._targets.add(view.memory)
            self._events.append(Serves(name, layer, view, is_buffer))

    def stand_in(self, name: str, meta: torch.Tensor) -> None:
        """Tells that the loader writes to `meta` first what becomes the parameter `name`."""
        if meta.device.type == "meta":
            self._events.append(StandsIn(name, self._target(meta)))

    def refuse(self, layer: str, problem: str) -> None:
        """Tells that something of a layer follows from its weights that may not be seen here."""
        self._events.append(Processed(layer, problem))

    @contextlib.contextmanager
    def loading(self, batch: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Watches what happens while the loader has this batch; () stands for its finish."""
        if self._about is not None and not any(name in self._about for name, _ in batch):
            yield
            return
        for name, tensor in batch:
            view = self._view(tensor)
            self._received.add(view.memory)
            self._events.append(Received(name, view))
        with watched(self._see, self._see_call):
            yield
        self._received.clear()
        self._events.append(BatchEnded())

    def plan(self, now: Callable[[str], torch.Tensor | None]) -> LoadPlan:
        """What was learned, once the load is finished.

        Args:
            now: the model's parameter or buffer of a name, as it is now.
        """
        for name in self._serving:
            tensor = now(name)
            self._events.append(Found(name, None if tensor is None else self._view(tensor)))
        self._events += [
            Changed(name)
            for name, checksum in self._buffers.items()
            if _checksum(self._serving[name]) != checksum
        ]
        seen = seen_load(self._events)
        if self._about is not None:
            return plan_seen(seen, None)
        held = [
            _checksum(bytes_of(self._serving[promise.parameter], promise.region))
            for promise in seen.promises
        ]
        return plan_seen(seen, held)

    def _see(self, func: torch._ops.OpOverload, arguments: object, answer: object) -> None:
        """One operation, already done."""
        tensors = tensors_in(arguments)
        if gave_views(func, tensors, answer):
            return
        if func is _aten.copy_.default and len(tensors) == 2:
            self._events.append(self._copied(*tensors))
            return
        views = self._views(tensors)
        if func in _FILLS:
            filled, views = views[0], views[1:]
            is_constant = all(each.memory not in self._received for each in views)
            is_zero = is_constant and filled.is_plain and _is_zero(arguments)
            self._events.append(Filled(filled, is_zero))
        if views:
            rows = rows_taken(func, arguments)
            read = views if rows is None else self._views(rows)
            self._events.append(Used(str(func), views, read))

    def _see_call(self, func: str, arguments: object) -> None:
        """One call of an operator that torch itself does not bring, about to be made.

        Some are registered so that the dispatch mode does not see them.
        """
        views = self._views(tensors_in(arguments))
        self._events.append(Used(func, views, views))

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        to, of = self._view(target), self._view(source)
        is_load = to.memory in self._targets and of.memory in self._received
        return Copied(to, of, _checksum(source) if is_load and are_same_bytes(to, of) else "")

    def _target(self, tensor: torch.Tensor) -> View:
        """What is to be loaded into."""
        view = self._view(tensor)
        self._targets.add(view.memory)
        return view

    def _views(self, tensors: Sequence[torch.Tensor]) -> tuple[View, ...]:
        return tuple(self._view(each) for each in tensors)

    def _view(self, tensor: torch.Tensor) -> View:
        storage = tensor.untyped_storage()
        memory: int = storage._cdata
        if memory not in self._references:
            self._references[memory] = StorageWeakRef(storage)
        return View(
            memory=memory,
            offset_bytes=int(tensor.storage_offset()) * tensor.itemsize,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            dtype=dtype_name(tensor.dtype),
            item_bytes=tensor.itemsize,
            is_plain=not (tensor.is_conj() or tensor.is_neg()),
        )


def _is_zero(arguments: object) -> bool:
    """Whether a fill makes all bytes 0, given what it is called with."""
    match arguments:
        # Of one dtype, no element can be 0.
        case ((torch.Tensor() as target, *values), _) if target.dtype != torch.float8_e8m0fnu:
            numbers = (each.item() if isinstance(each, torch.Tensor) else each for each in values)
            return all(str(each) in ("0", "0.0", "False") for each in numbers)
    return False


def _checksum(tensor: torch.Tensor) -> str:
    """XXH3 of a tensor's contents in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    contents: memoryview = flat.cpu().numpy().data
    return xxhash.xxh3_64_hexdigest(contents)
