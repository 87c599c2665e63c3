"""What is known of the loader of a rank's model, from one stream to the next.

`rollsync.pure.refit.learned` says what a load teaches and when it is watched.

Rule kept here: what was learned holds for the declared tensors and the very memory that it was
learned of: when a parameter has moved, or after a sync that failed, everything is learned anew from
a load of whole tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from returns.pipeline import is_successful

from rollsync.pure.refit import TensorSpec, describe
from rollsync.pure.refit.direct import destinations_of
from rollsync.pure.refit.layout import Part
from rollsync.pure.refit.learned import (
    Learned,
    confirm,
    is_to_be_watched,
    learn,
    undeclared_ties,
)
from rollsync.pure.refit.load_plan import LoadPlan
from rollsync.shell.refit.boxes import bytes_of
from rollsync.shell.refit.engines.direct import Destinations
from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.intake import Intake, KeptParts, PartlyDirect, WholeTensors
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(frozen=True)
class Reception:
    """How the next stream is to be received.

    Attributes:
        declared: what it holds, as far as that is known.
        recorder: watches its load; None when nothing is to be learned from it.
        layout: the parts that the rank keeps; None: all of every tensor.
        destinations: where tensors are read to directly; None: all come in batches.
        plan: what is known of the loader.
    """

    declared: tuple[TensorSpec, ...]
    recorder: LoadRecorder | None
    layout: tuple[Part, ...] | None
    destinations: Destinations | None
    plan: LoadPlan

    def intake(self, *, in_parts: bool) -> Intake:
        """Takes the stream, which has begun; fills what no tensor of it fills.

        Args:
            in_parts: whether it comes in the parts that the rank keeps, or else whole.
        """
        intake: Intake = (
            KeptParts(self.declared, self.layout or ())
            if in_parts
            else WholeTensors({spec.name: spec for spec in self.declared})
        )
        if self.destinations is None:
            return intake
        for name, region in self.plan.zeros:
            bytes_of(self.destinations.parameters[name], region).zero_()
        return PartlyDirect(
            intake,
            self.destinations,
            known=self.plan.tensors.keys(),
            aliases={alias for spec in self.declared for alias in spec.aliases},
        )


class LearnedLoad:
    """What was learned of one model, or nothing yet.

    Args:
        model: answers the model that is loaded; None: nothing is ever learned.
        is_shared: whether several ranks share it, so that each keeps parts of it.
    """

    def __init__(self, model: Callable[[], torch.nn.Module] | None, *, is_shared: bool) -> None:
        self._model = model
        self._is_shared = is_shared
        self._declared: tuple[TensorSpec, ...] = ()
        self.forget()

    def declare(self, declared: Sequence[TensorSpec]) -> None:
        """Takes what streams hold; what was learned of others is forgotten."""
        if self._declared != tuple(declared):
            self._declared = tuple(declared)
            self.forget()

    def forget(self) -> None:
        """The next stream is to be whole, and watched."""
        self._known: Learned | None = None
        self._stamps: dict[str, _Stamp] = {}
        """Of the parameters that were seen to be filled by copies alone."""
        self._destinations: Destinations | None = None
        """Those of the plan, once they were asked for, without the parameters."""

    def reception(self, *, directly: bool) -> Reception:
        """How the next stream is received.

        Args:
            directly: whether the engine may read tensors straight into the model.
        """
        destinations = self._destinations_now() if directly and self._model is not None else None
        known = self._known
        return Reception(
            declared=self._declared,
            recorder=self._recorder(directly=directly),
            layout=None if known is None else known.layout,
            destinations=destinations,
            plan=LoadPlan() if known is None else known.plan,
        )

    def learn(self, recorder: LoadRecorder) -> None:
        """Takes what was watched, when its load is finished.

        Raises:
            WeightMismatch: the load was of parts, and read something else of a tensor than these.
        """
        serving = self._serving()
        seen = recorder.plan(serving.get)
        if self._known is not None:
            confirmed = confirm(self._known, self._declared, seen)
            if not is_successful(confirmed):
                error = confirmed.failure()
                raise WeightMismatch(describe(error), tensor=error.tensor)
            self._known = confirmed.unwrap()
            return
        self._known = learn(self._declared, seen, is_shared=self._is_shared)
        self._log(seen)
        plan = self._known.plan
        written = {copy.parameter for each in plan.direct.values() for copy in each.copies}
        written |= {name for name, _ in plan.zeros}
        self._stamps = {name: _stamp(serving[name]) for name in written}

    def _recorder(self, *, directly: bool) -> LoadRecorder | None:
        known = self._known
        in_parts = self._is_shared and bool(self._declared)
        if self._model is None or not is_to_be_watched(known, in_parts=in_parts, directly=directly):
            return None
        about = None if known is None else known.unconfirmed
        return LoadRecorder(serving_tensors(self._model()), about=about)

    def _log(self, seen: LoadPlan) -> None:
        tied = undeclared_ties(self._declared, seen)
        if tied:
            logger.warning("%s came tied and undeclared: nothing is read directly", min(tied))
            return
        staged = next((each for each in seen.tensors.values() if not each.is_direct), None)
        logger.info(
            "%d of %d tensors can be read straight into the model (%d bytes)%s",
            len(seen.direct),
            len(seen.tensors),
            seen.direct_bytes,
            f"; not {staged.spec.name}: {staged.staged_because}" if staged else "",
        )

    def _destinations_now(self) -> Destinations | None:
        """What the next stream can be read into; None when nothing is known, or nothing holds."""
        known = self._known
        if known is None or not known.plan.layers:
            return None
        serving = self._serving()
        for name, stamp in self._stamps.items():
            if name not in serving or _stamp(serving[name]) != stamp:
                logger.warning(
                    "parameter %s is not where it was: the next weights come through buckets", name
                )
                self.forget()
                return None
        if self._destinations is None:
            self._destinations = Destinations(
                destinations_of(known.plan),
                {name: each.copies for name, each in known.plan.direct.items()},
                {},
            )
        return self._destinations.into({name: serving[name].detach() for name in self._stamps})

    def _serving(self) -> dict[str, torch.Tensor]:
        if self._model is None:
            return {}
        return {name: tensor for name, (_, tensor) in serving_tensors(self._model()).items()}


def _stamp(tensor: torch.Tensor) -> _Stamp:
    return (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.shape, tensor.stride())
