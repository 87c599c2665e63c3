"""What is known of a model's loader, from one update of the model to the next.

Rule kept here: what was learned holds for the very memory that it was learned of; when a parameter
has moved, or changed its form, everything is learned anew from an ordinary load.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from rollsync.pure.refit.direct import destinations_of
from rollsync.pure.refit.load_plan import LoadPlan
from rollsync.shell.refit.engines.direct import Destinations
from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]


class LearnedLoad:
    """What was learned of one model, or nothing yet.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._plan: LoadPlan | None = None
        self._stamps: dict[str, _Stamp] = {}

    def destinations(self) -> Destinations | None:
        """What the next stream can be read into; None when nothing is known, or nothing holds."""
        plan = self._plan
        if plan is None or not plan.layers:
            return None
        parameters = {name: tensor for name, (_, tensor) in serving_tensors(self._model).items()}
        for name, stamp in self._stamps.items():
            if name not in parameters or _stamp(parameters[name]) != stamp:
                logger.warning(
                    "parameter %s is not where it was: the next weights come through buckets", name
                )
                self.forget()
                return None
        return Destinations(
            destinations_of(plan),
            {name: each.copies for name, each in plan.direct.items()},
            {name: parameters[name].detach() for name in self._stamps},
        )

    @property
    def layers(self) -> frozenset[str]:
        """The layers that need no loader."""
        return frozenset() if self._plan is None else self._plan.layers

    @property
    def is_empty(self) -> bool:
        """Whether nothing was learned yet."""
        return self._plan is None

    def recorder(self) -> LoadRecorder:
        """Watches an ordinary load."""
        return LoadRecorder(serving_tensors(self._model))

    def learn(self, recorder: LoadRecorder) -> None:
        """Keep what was seen of a load that is finished."""
        tensors = {name: tensor for name, (_, tensor) in serving_tensors(self._model).items()}
        self._plan = recorder.plan(tensors.get)
        written = {c.parameter for each in self._plan.direct.values() for c in each.copies}
        self._stamps = {name: _stamp(tensors[name]) for name in written}
        staged = [name for name, each in self._plan.tensors.items() if not each.is_direct]
        logger.info(
            "%d of %d tensors can be read straight into the model (%d bytes)%s",
            len(self._plan.direct),
            len(self._plan.tensors),
            self._plan.direct_bytes,
            f"; not {staged[0]}: {self._plan.tensors[staged[0]].staged_because}" if staged else "",
        )

    def forget(self) -> None:
        """Learn anew with the next load."""
        self._plan = None
        self._stamps = {}

    def check_known(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Refuse what a loader might load over what is read directly.

        Raises:
            WeightMismatch: the load that was learned from had no such tensor.
        """
        plan = self._plan
        for name, _ in batch if plan is not None and plan.layers else ():
            if plan is not None and name not in plan.tensors:
                self.forget()
                raise WeightMismatch(
                    f"weight {name!r} was not in the stream from which it was learned what can be"
                    " read directly",
                    tensor=name,
                    remedy="run the sync again, which learns anew; send the same weights each time",
                )


def missing(destinations: Destinations, loaded: Mapping[str, object]) -> list[str]:
    """The tensors that came in no way."""
    return [
        each.name
        for each in destinations.wanted
        if each.name not in destinations.arrived and each.name not in loaded
    ]


def _stamp(tensor: torch.Tensor) -> _Stamp:
    return (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.shape, tensor.stride())
