"""What is known of the loader of a rank's model, from one stream to the next.

A first load, of whole tensors, is watched. What was seen tells two things for the streams that
follow: which part of each tensor the rank keeps, so that it is sent no more, and which tensors the
loader only copies, so that an engine may read them straight into the model.

Rules kept here: what was learned holds for the declared tensors and the very memory that it was
learned of: when a parameter has moved, or after a sync that failed, everything is learned anew from
a load of whole tensors; and the first load of a tensor's parts is watched too, as a loader that
reads anything else of it would read what never came.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.direct import destinations_of
from rollsync.pure.refit.kept import kept_bytes, kept_layout
from rollsync.pure.refit.layout import Part, whole
from rollsync.pure.refit.load_plan import LoadPlan
from rollsync.shell.refit.engines.direct import Destinations
from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.intake import DirectReads, Intake, KeptParts, WholeTensors
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]]
_NOTHING = LoadPlan(tensors={}, layers=frozenset())


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

    def intake(self, *, in_parts: bool, are_whole: bool) -> Intake:
        """Takes the stream, which has begun.

        Args:
            in_parts: whether it comes in the parts that the rank keeps, or else whole.
            are_whole: False when the engine cuts tensors as it finds right.
        """
        intake: Intake = (
            KeptParts(self.declared, self.layout or ())
            if in_parts
            else WholeTensors({spec.name: spec for spec in self.declared}, are_whole=are_whole)
        )
        if self.destinations is None:
            return intake
        return DirectReads(
            intake,
            self.destinations,
            known=self.plan.tensors.keys(),
            aliases=_aliases(self.declared),
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
        self._plan: LoadPlan | None = None
        self._layout: tuple[Part, ...] | None = None
        self._unconfirmed: frozenset[str] = frozenset()
        """The tensors of which parts are kept that were not seen to be loaded yet."""
        self._stamps: dict[str, _Stamp] = {}
        self._destinations: Destinations | None = None
        """Those of the plan, once they were asked for, without the parameters."""

    def reception(self, *, directly: bool) -> Reception:
        """How the next stream is received.

        Args:
            directly: whether the engine may read tensors straight into the model.
        """
        destinations = self._destinations_now() if directly and self._model is not None else None
        return Reception(
            declared=self._declared,
            recorder=self._recorder(directly=directly),
            layout=self._layout,
            destinations=destinations,
            plan=self._plan or _NOTHING,
        )

    def learn(self, recorder: LoadRecorder) -> None:
        """Takes what was watched, when its load is finished.

        Raises:
            WeightMismatch: the load was of parts, and read something else of a tensor than these.
        """
        serving = self._serving()
        seen = recorder.plan(serving.get)
        if self._plan is not None:
            self._confirm(seen)
            return
        if self._is_shared:
            self._learn_layout(seen)
        self._plan = self._trusted(seen, recorder)
        written = {c.parameter for each in self._plan.direct.values() for c in each.copies}
        self._stamps = {name: _stamp(serving[name]) for name in written}

    def _recorder(self, *, directly: bool) -> LoadRecorder | None:
        if self._model is None:
            return None
        if self._plan is not None:
            if not self._unconfirmed:
                return None
            return LoadRecorder(serving_tensors(self._model()), about=self._unconfirmed)
        if directly or (self._is_shared and self._declared):
            return LoadRecorder(serving_tensors(self._model()))
        return None

    def _learn_layout(self, seen: LoadPlan) -> None:
        layout = kept_layout(self._declared, seen)
        everything = sum(spec.tensor_bytes for spec in self._declared)
        if kept_bytes(self._declared, layout) < everything:
            wholes = {Part(spec.name, whole(spec)) for spec in self._declared}
            in_parts = {part.name for part in layout if part not in wholes}
            self._layout = layout
            self._unconfirmed = frozenset(s.name for s in self._declared if s.name in in_parts)

    def _confirm(self, seen: LoadPlan) -> None:
        """Compares parts that were loaded with those that the rank is sent."""
        loaded = [
            spec
            for spec in self._declared
            if spec.name in self._unconfirmed and spec.name in seen.tensors
        ]
        names = {name for spec in loaded for name in (spec.name, *spec.aliases)}
        sent = {part for part in self._layout or () if part.name in names}
        for part in sent.symmetric_difference(kept_layout(loaded, seen)):
            raise WeightMismatch(
                f"the engine's loader read other parts of {part.name!r} than in the sync before",
                tensor=part.name,
                remedy="run the sync again: it will be whole",
            )
        self._unconfirmed -= names

    def _trusted(self, seen: LoadPlan, recorder: LoadRecorder) -> LoadPlan:
        """What holds for later streams too."""
        undeclared = recorder.tied - _aliases(self._declared)
        if undeclared:
            # What is one tensor in this stream may be two in the next.
            logger.warning("%s came tied and undeclared: nothing is read directly", min(undeclared))
            return _NOTHING
        staged = [name for name, each in seen.tensors.items() if not each.is_direct]
        logger.info(
            "%d of %d tensors can be read straight into the model (%d bytes)%s",
            len(seen.direct),
            len(seen.tensors),
            seen.direct_bytes,
            f"; not {staged[0]}: {seen.tensors[staged[0]].staged_because}" if staged else "",
        )
        return seen

    def _destinations_now(self) -> Destinations | None:
        """What the next stream can be read into; None when nothing is known, or nothing holds."""
        plan = self._plan
        if plan is None or not plan.layers:
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
                destinations_of(plan),
                {name: each.copies for name, each in plan.direct.items()},
                {},
            )
        return self._destinations.into({name: serving[name].detach() for name in self._stamps})

    def _serving(self) -> dict[str, torch.Tensor]:
        if self._model is None:
            return {}
        return {name: tensor for name, (_, tensor) in serving_tensors(self._model()).items()}


def _aliases(declared: Sequence[TensorSpec]) -> frozenset[str]:
    return frozenset(alias for spec in declared for alias in spec.aliases)


def _stamp(tensor: torch.Tensor) -> _Stamp:
    return (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.shape, tensor.stride())
