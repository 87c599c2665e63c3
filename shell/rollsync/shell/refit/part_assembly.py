"""Puts the parts of a stream in their places, for a loader that takes tensors of full shape.

The loader reads the parts that came and nothing else, as was learned of it; so it is vLLM's own
loader, whatever it does, that loads.

Rule kept here: a tensor is handed on once, when every part of it has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.layout import Part, SentPart, plan_parts, whole
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.errors import accepted

SMALLEST_LOAD_BYTES = 64 * 1024 * 1024
"""Tensors of full shape are handed to the loader when they are at least this large together."""


class PartAssembly:
    """Puts the parts of one stream in their places in tensors of full shape.

    Args:
        specs: the declared tensors.
        layout: what comes of them.
    """

    def __init__(self, specs: Sequence[TensorSpec], layout: Sequence[Part]) -> None:
        planned = accepted(plan_parts(specs, layout, rank=0))
        self._parts = {part.spec.name: part for part in planned}
        self._left: dict[str, int] = {}
        for part in planned:
            self._left[part.source] = self._left.get(part.source, 0) + 1
        self.specs = {spec.name: spec for spec in specs if spec.name in self._left}
        """The tensors of which something comes, by name."""
        self._further = {a for part in planned for a in part.spec.aliases}
        self._open: dict[str, torch.Tensor] = {}

    def loads(
        self, batch: Sequence[tuple[str, torch.Tensor]]
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
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
