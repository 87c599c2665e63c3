"""What is known of a model's loader, from one update of the model to the next.

Rule kept here: what was learned holds for the very memory that it was learned of; when a parameter
has moved, or changed its form, everything is learned anew from an ordinary load.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set

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
        self._destinations: Destinations | None = None
        """Those of the plan, once they were asked for, without the parameters."""

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
        if self._destinations is None:
            self._destinations = Destinations(
                destinations_of(plan),
                {name: each.copies for name, each in plan.direct.items()},
                {},
            )
        return self._destinations.into({name: parameters[name].detach() for name in self._stamps})

    @property
    def layers(self) -> frozenset[str]:
        """The layers that need no loader."""
        return frozenset() if self._plan is None else self._plan.layers

    def check_complete(self, destinations: Destinations, loaded: Set[str]) -> None:
        """Called at the end of a stream, of which `loaded` came in batches.

        Raises:
            WeightMismatch: something of which the model was to be filled did not come.
        """
        for each in destinations.wanted:
            if each.name not in destinations.arrived and each.name not in loaded:
                raise WeightMismatch(
                    f"the stream ended without weights for {each.name!r}",
                    tensor=each.name,
                    remedy="send the same weights in each sync",
                )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was learned yet."""
        return self._plan is None

    def recorder(self) -> LoadRecorder:
        """Watches an ordinary load."""
        return LoadRecorder(serving_tensors(self._model))

    def learn(self, recorder: LoadRecorder, declared_aliases: Set[str]) -> None:
        """Keep what was seen of a load that is finished.

        Args:
            recorder: watched it.
            declared_aliases: names of which the policy has declared that they are never sent.
        """
        if recorder.tied - declared_aliases:
            # What is one tensor in this stream may be two in the next.
            logger.warning(
                "%s came tied and undeclared: nothing is read directly",
                min(recorder.tied - declared_aliases),
            )
            self._plan = LoadPlan(tensors={}, layers=frozenset())
            return
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
        self._destinations = None

    def check_known(self, names: Sequence[str]) -> None:
        """Refuse what a loader might load over what is read directly.

        Raises:
            WeightMismatch: the load that was learned from had no such tensor.
        """
        plan = self._plan
        if plan is None or not plan.layers:
            return
        for name in names:
            if name not in plan.tensors:
                self.forget()
                raise WeightMismatch(
                    f"weight {name!r} was not in the stream from which it was learned what can be"
                    " read directly",
                    tensor=name,
                    remedy="run the sync again, which learns anew; send the same weights each time",
                )


class DirectLoad:
    """One stream that is read directly, and what of it comes in batches all the same.

    Args:
        learned: what is known of the loader.
        destinations: where tensors are read to.
        aliases: names that come beside others, of the same bytes.
    """

    def __init__(self, learned: LearnedLoad, destinations: Destinations, aliases: Set[str]) -> None:
        self._learned = learned
        self._destinations = destinations
        self._aliases = aliases
        self._loaded: set[str] = set()

    def note_batch(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Check what is about to be loaded.

        Raises:
            WeightMismatch: it may be loaded over what is read directly.
        """
        names = [name for name, _ in batch if name not in self._aliases]
        self._learned.check_known(names)
        self._loaded.update(names)

    def arrivals(self) -> dict[str, int]:
        """At the end of the stream: the tensors that were read, and their bytes.

        Raises:
            WeightMismatch: something of which the model was to be filled did not come.
        """
        self._learned.check_complete(self._destinations, self._loaded)
        return self._destinations.arrived


def _stamp(tensor: torch.Tensor) -> _Stamp:
    return (tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.shape, tensor.stride())
