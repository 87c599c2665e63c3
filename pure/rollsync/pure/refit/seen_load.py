"""What a watched load says: which bytes of each received tensor were written where, and of what
that cannot be said.

Memory is told apart by its number: a received tensor's (a source); a parameter's, or a buffer's,
that serves; a stand-in's, which has no elements; and any other's that got something of a source
(scratch). An example is how vLLM reloads a layer whose `qk.weight` [6, 4] gets the rows of `q`
[4, 4] and of `k` [2, 4]:

1. The reload begins: the layer has a stand-in in its parameter's place (`StandsIn`).
2. `q` is `Received` in a batch. The loader copies it to rows 0 to 3 of the stand-in, so as to count
   what the layer has got: that counts as a copy to these rows of `qk.weight`, and all of `q` as
   read. `q` is kept by the loader until the layer has everything.
3. `k` comes and is copied to rows 4 and 5 of the stand-in. Now the layer is whole: the loader makes
   scratch [6, 4], loads `q` and `k` into it once more, and processes the layer, which here does
   nothing to it.
4. The scratch is copied to the parameter that serves: it is settled. What was written to it has to
   be what was written to the stand-in, and nothing else may have been done with it.
5. After the load `qk.weight` is where it was. `plan_seen` is given the checksums of what it holds,
   which have to be those of the copies, and answers that `q` is its rows 0 to 3, `k` its rows 4
   and 5.

A loader that copies a source straight to what serves, as one of a plain torch module does, is seen
to do so in step 2, and there are no others.

Rules kept here: what is not seen to be a plain copy is a problem of the tensor or parameter that it
touches, and `plan_load` decides what follows; all that an operation is given of a received tensor
counts as read; and where a copy that was seen is not found again, by its checksum, in the serving
memory after the load, or something is there that was not seen to be loaded, something was done that
is not seen (by another thread, through an address), and every tensor is loaded as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rollsync.pure.refit.layout import whole
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
)
from rollsync.pure.refit.load_plan import (
    LoadPlan,
    Region,
    SeenParameter,
    SeenTensor,
    plan_load,
)
from rollsync.pure.refit.seen_memory import Scratch, Serving, Source


class Promise(Struct, frozen=True):
    """What a parameter has to hold after the load, if all that was seen is all that happened.

    Attributes:
        parameter: Its name.
        region: Part of its memory.
        checksum: Of the bytes that were copied there.
    """

    parameter: str
    region: Region
    checksum: str


class SeenLoad(Struct, frozen=True):
    """One load, as it was seen.

    Attributes:
        tensors: What the loader was given, by name, in stream order.
        parameters: What serves, by name.
        promises: What remains to be compared.
        tied: Names that came with the very bytes of another one, and count as that one's.
        unexplained: Parameters, and buffers that have changed, of which not all was seen to be
            written; all of a parameter is loaded.
    """

    tensors: dict[str, SeenTensor]
    parameters: dict[str, SeenParameter]
    promises: tuple[Promise, ...]
    tied: frozenset[str]
    unexplained: tuple[str, ...] = ()


def seen_load(events: Iterable[LoadEvent]) -> SeenLoad:
    """What the events of one load say, from before its first batch to after its last."""
    reader = _Reader()
    for event in events:
        reader.see(event)
    return reader.seen()


def plan_seen(seen: SeenLoad, held: Sequence[str] | None) -> LoadPlan:
    """The plan that follows.

    Args:
        seen: The load.
        held: For each promise, the checksum of what its region holds now; None: not all of the load
            was watched, and nothing is said of what was not seen.
    """
    tensors: Mapping[str, SeenTensor] = seen.tensors
    problem = "" if held is None else _unseen(seen, held)
    if problem:
        # It may be of any tensor, and any may have led to it.
        tensors = {
            name: SeenTensor(each.spec, (), each.problem or problem, (whole(each.spec),))
            for name, each in seen.tensors.items()
        }
    return replace(plan_load(tensors, seen.parameters), tied=seen.tied)


def _unseen(seen: SeenLoad, held: Sequence[str]) -> str:
    """What shows that something was done that was not seen; empty when nothing does."""
    for promise, checksum in zip(seen.promises, held, strict=True):
        if promise.checksum != checksum:
            return f"{promise.parameter} does not hold what was copied to it"
    for name in seen.unexplained:
        return f"not all that {name} holds was seen to be loaded"
    return ""


class _Reader:
    """The state of `seen_load`, from one event to the next."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._batch: dict[int, list[Source]] = {}
        """The received tensors of the current batch, by memory."""
        self._parameters: dict[str, Serving] = {}
        self._serving: dict[int, Serving] = {}
        """By memory, their own and that of their stand-ins."""
        self._scratch: dict[int, Scratch] = {}
        self._tied: set[str] = set()
        self._reloaded: set[str] = set()
        """The layers that have stand-ins: whatever is done to them is done again with all of them.
        """

    def see(self, event: LoadEvent) -> None:
        match event:
            case Serves():
                self._serves(event)
            case StandsIn(name=name, view=view):
                if name in self._parameters:
                    known = self._serving[view.memory] = self._parameters[name]
                    known.stands_in(view)
                    self._reloaded.add(known.layer)
            case Processed(layer=layer, problem=problem):
                for each in self._parameters.values():
                    if each.layer == layer:
                        each.note_problem(problem)
            case Received(name=name, view=view):
                self._received(name, view)
            case BatchEnded():
                self._batch = {}
            case Copied():
                self._copied(event)
            case Filled(target=target, is_zero=is_zero):
                self._filled(target, is_zero=is_zero)
            case Used(by=by, views=views, read=read):
                for view in read:
                    self._read(view)
                for view in views:
                    self._used(view, by)
            case Found(name=name, view=found):
                if name in self._parameters:
                    self._parameters[name].found(found)
            case Changed(name=name):
                if name in self._parameters:
                    self._parameters[name].changed()

    def seen(self) -> SeenLoad:
        for scratch in self._scratch.values():
            for name in () if self._is_explained(scratch) else scratch.names:
                self._sources[name].note_problem("it is kept somewhere else too")
        return SeenLoad(
            tensors={name: each.seen() for name, each in self._sources.items()},
            parameters={name: each.seen() for name, each in self._parameters.items()},
            promises=tuple(
                Promise(copy.parameter, copy.target, checksum)
                for source in self._sources.values()
                for copy, checksum in source.copies.items()
                if not self._parameters[copy.parameter].problem
            ),
            tied=frozenset(self._tied),
            unexplained=tuple(
                name for name, each in self._parameters.items() if not each.is_explained
            ),
        )

    def _serves(self, event: Serves) -> None:
        view = event.view
        known = self._serving.get(view.memory)
        if known is None:
            self._serving[view.memory] = self._parameters[event.name] = Serving(event)
        elif (known.view.offset_bytes, known.view.shape) != (view.offset_bytes, view.shape):
            # This says more than that it is a part of another's memory.
            known.shares(event)

    def _received(self, name: str, view: View) -> None:
        known = self._sources.get(name)
        if known is not None:
            known.note_problem("it was loaded twice")
            known.read_whole()
            return
        source = Source(name, view)
        held = self._batch.setdefault(view.memory, [])
        if any((each.start, each.end) == (source.start, source.end) for each in held):
            # A further name of a tied weight: whatever is done with it is done with the first.
            self._tied.add(name)
            return
        self._sources[name] = source
        held.append(source)

    def _copied(self, event: Copied) -> None:
        target, source = event.target, event.source
        self._read(target)
        self._read(source)
        if not target.total_bytes:
            return
        self._changed(target)
        to, received = self._serving.get(target.memory), self._source_of(source)
        if to is not None:
            to.overwritten(target)
        if to is None:
            if received is None:
                self._used(source, "a copy")
            scratch = self._scratch.setdefault(target.memory, Scratch())
            scratch.copied(target, source, "" if received is None else received.name)
        elif received is not None:
            to.touched(0)
            to.copied(event, received)
        elif source.memory in self._serving:
            self._moved_on(to, self._serving[source.memory], event)
        else:
            to.touched(self._led_to(to))
            to.settled(target, source, self._scratch.get(source.memory))

    def _moved_on(self, to: Serving, of: Serving, event: Copied) -> None:
        """What serves became something else that serves, which follows it from now on."""
        if event.source == event.target:
            return
        problem = f"{to.name} gets what {of.name} holds"
        for each in (to, of):
            each.touched(len(self._sources) if self._batch else 0)
            each.note_problem("parts of it are moved within it" if to is of else problem)

    def _filled(self, target: View, *, is_zero: bool) -> None:
        self._read(target)
        if not target.total_bytes:
            return
        self._changed(target)
        to = self._serving.get(target.memory)
        if to is not None:
            to.overwritten(target)
            to.touched(self._led_to(to))
            to.filled(target, is_zero=is_zero)

    def _used(self, view: View, by: str) -> None:
        memory = view.memory
        serving = self._serving.get(memory)
        if serving is not None:
            serving.touched(self._led_to(serving))
        for each in (self._source_of(view), serving, self._scratch.get(memory)):
            if each is not None:
                each.note_problem(f"{by} uses it")

    def _led_to(self, serving: Serving) -> int:
        """How many of the tensors may have led to what the loader does to this of itself.

        What it does to layers that are reloaded as wholes, or when it finishes, it does anyway.
        """
        return len(self._sources) if self._batch and serving.layer not in self._reloaded else 0

    def _read(self, view: View) -> None:
        source = self._source_of(view)
        if source is not None:
            source.read(view)

    def _changed(self, target: View) -> None:
        """Something was written; it may be a received tensor."""
        source = self._source_of(target)
        if source is not None:
            source.note_problem("it is changed before it is loaded")

    def _source_of(self, view: View) -> Source | None:
        """The received tensor whose bytes these are."""
        batch = self._batch.get(view.memory, ())
        return next((each for each in batch if each.has(view)), None)

    def _is_explained(self, scratch: Scratch) -> bool:
        """Whether it was a parameter on its way, with nothing in it but what was counted before."""
        return scratch.is_settled or any(
            each.explains(scratch) for each in self._parameters.values()
        )
