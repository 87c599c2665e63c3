"""A rank that is sent only what it keeps: how it learns that, and loads it all the same.

The rank's own loader is watched during the first sync, which is whole. From then on its layout goes
to the sender, and each part that comes is put in its place in a tensor of full shape, of which the
loader reads that part and nothing else; so it is vLLM's own loader, whatever it does, that loads.

Rules kept here: the first sync in parts is watched too, and a loader that reads anything but the
parts fails it; and after a sync that failed the next one is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from returns.pipeline import is_successful

from rollsync.pure.refit import TensorSpec, describe
from rollsync.pure.refit.kept import kept_bytes, kept_layout
from rollsync.pure.refit.layout import Part, SentPart, plan_parts, whole
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.errors import RefitError, WeightMismatch
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors

Batch = Sequence[tuple[str, torch.Tensor]]

SMALLEST_LOAD_BYTES = 64 * 1024 * 1024
"""Tensors of full shape are handed to the loader when they are at least this large together."""


class KeptParts:
    """What one rank has learned about its loader.

    Args:
        model: answers the model that is loaded.
    """

    def __init__(self, model: Callable[[], torch.nn.Module]) -> None:
        self._model = model
        self._specs: tuple[TensorSpec, ...] = ()
        self._known = False
        self._confirmed = False
        self.layout: tuple[Part, ...] | None = None
        """What the rank keeps; None: all of every tensor, also as long as that is not known."""

    def declare(self, specs: Sequence[TensorSpec]) -> None:
        """Takes what streams hold; what was learned of others is forgotten."""
        if self._specs != tuple(specs):
            self._specs = tuple(specs)
            self.forget()

    def forget(self) -> None:
        """The next stream is to be whole, and watched."""
        self._known = self._confirmed = False
        self.layout = None

    def recorder(self) -> LoadRecorder | None:
        """Watches the next load; None when nothing is to be learned from it."""
        if not self._specs or self._confirmed:
            return None
        return LoadRecorder(serving_tensors(self._model()))

    def learn(self, recorder: LoadRecorder) -> None:
        """Takes what was watched, when its load is finished.

        Raises:
            WeightMismatch: the load was of parts, and read more of a tensor than these.
        """
        serving = {name: tensor for name, (_, tensor) in serving_tensors(self._model()).items()}
        plan = recorder.plan(serving.get)
        if not self._known:
            layout = kept_layout(self._specs, plan)
            everything = sum(spec.tensor_bytes for spec in self._specs)
            saves = kept_bytes(self._specs, layout) < everything
            self._known, self._confirmed = True, not saves
            self.layout = layout if saves else None
            return
        kept = {part.name for part in self.layout or ()}
        again = kept_layout([spec for spec in self._specs if spec.name in kept], plan)
        for part in set(again).symmetric_difference(self.layout or ()):
            raise WeightMismatch(
                f"the engine's loader read other parts of {part.name!r} than in the sync before",
                tensor=part.name,
                remedy="run the sync again: it will be whole",
            )
        self._confirmed = True

    def assembly(self) -> PartAssembly:
        """Puts the parts of one stream together."""
        return PartAssembly(self._specs, self.layout or ())


class PartAssembly:
    """Puts the parts of one stream in their places in tensors of full shape.

    Args:
        specs: the declared tensors.
        layout: what comes of them.
    """

    def __init__(self, specs: Sequence[TensorSpec], layout: Sequence[Part]) -> None:
        planned = plan_parts(specs, layout, rank=0)
        if not is_successful(planned):
            raise RefitError(describe(planned.failure()))
        self._parts = {part.spec.name: part for part in planned.unwrap()}
        self._left: dict[str, int] = {}
        for part in planned.unwrap():
            self._left[part.source] = self._left.get(part.source, 0) + 1
        self.specs = {spec.name: spec for spec in specs if spec.name in self._left}
        """The tensors of which something comes, by name."""
        self._further = {a for part in planned.unwrap() for a in part.spec.aliases}
        self._open: dict[str, torch.Tensor] = {}

    def loads(self, batch: Batch) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The tensors of which every part has come, under their declared names, a load at a time.

        What was not declared goes through as it is; the names of a tied tensor come from what was
        declared, and not from here.
        """
        load: list[tuple[str, torch.Tensor]] = []
        load_bytes = 0
        for name, tensor in batch:
            if name in self._further:
                continue
            part = self._parts.get(name)
            full = (name, tensor) if part is None else self._placed(part, tensor)
            if full is None:
                continue
            load.append(full)
            load_bytes += full[1].nbytes
            if load_bytes >= SMALLEST_LOAD_BYTES:
                yield load
                load, load_bytes = [], 0
        if load:
            yield load

    def _placed(self, part: SentPart, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        spec = self.specs[part.source]
        if part.box == whole(spec):
            return part.source, tensor
        full = self._open.get(part.source)
        if full is None:
            full = self._open[part.source] = tensor.new_empty(spec.shape)
        inside(full, part.box).copy_(tensor)
        self._left[part.source] -= 1
        if self._left[part.source]:
            return None
        return part.source, self._open.pop(part.source)
