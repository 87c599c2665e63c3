"""One weight update of a plain torch module, in place.

Rule kept here: shapes are checked before anything is overwritten, and an update that did not name
every parameter of the module is not finished.
"""

import contextlib
from collections.abc import Sequence

import torch

from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.load_recorder import LoadRecorder
from rollsync.shell.refit.weights import named_weights


class TorchModelUpdate:
    """An update of `module`; a tied weight is complete with any of its names.

    Args:
        module: what to update.
        recorder: watches what is copied where.
    """

    def __init__(self, module: torch.nn.Module, recorder: LoadRecorder | None = None) -> None:
        self._recorder = recorder
        self._weights = dict(named_weights(module))
        self._missing: dict[int, str] = {}
        self._left_out: frozenset[str] = frozenset()

    def leave_out(self, layers: frozenset[str]) -> None:
        """These modules get their weights by another way, which is checked there."""
        self._left_out = layers

    def start(self) -> None:
        """Opens the update."""
        self._missing = {id(tensor): name for name, tensor in self._weights.items()}
        for name, tensor in self._weights.items():
            if name.rpartition(".")[0] in self._left_out:
                self._missing.pop(id(tensor), None)

    @torch.no_grad()
    def load(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copies a batch into the module, converting types.

        Raises:
            WeightMismatch: when the module has no weight of a name, or one of another shape.
        """
        for name, tensor in batch:
            weight = self._weights.get(name)
            if weight is None or weight.shape != tensor.shape:
                held = "no such weight" if weight is None else f"the shape {list(weight.shape)}"
                raise WeightMismatch(
                    f"weight {name!r} of shape {list(tensor.shape)} arrived; the module has {held}",
                    tensor=name,
                    remedy="give policy and generation the same architecture",
                )
        with contextlib.nullcontext() if self._recorder is None else self._recorder.loading(batch):
            for name, tensor in batch:
                self._weights[name].copy_(tensor)
                self._missing.pop(id(self._weights[name]), None)

    def finish(self) -> None:
        """Closes the update.

        Raises:
            WeightMismatch: when a weight of the module did not arrive.
        """
        for name in self._missing.values():
            raise WeightMismatch(
                f"the stream ended without weights for {name!r}",
                tensor=name,
                remedy="give policy and generation the same architecture",
            )

    def abort(self) -> None:
        """Closes a failed update; the module is left as a mixture."""
        self._missing = {}
