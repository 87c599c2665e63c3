"""How the tensors of one stream get into a model.

They come whole, or in the parts that the rank keeps; and some may be read straight into the model,
past its loader, while the others come in batches of either kind.

Rule kept here: what the loader is given was compared with what was declared; and a stream is
complete when everything that was declared, or that the model is filled of, has come in some way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Protocol

import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.layout import Part
from rollsync.shell.refit.engines.direct import Destinations
from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.part_assembly import PartAssembly
from rollsync.shell.refit.weights import WeightChecker

Batch = Sequence[tuple[str, torch.Tensor]]
"""What an engine hands out, or a loader is given, at once; nobody changes it."""


class Intake(Protocol):
    """One stream on its way into a model."""

    def loads(self, batch: Batch, /) -> Iterator[Batch]:
        """What the loader is given of a batch: tensors of full shape, a tied one under each name.

        Raises:
            WeightMismatch: something is not what was declared, or learned before.
        """

    def past_loader(self) -> Mapping[str, int]:
        """The tensors that have come by another way than in batches, with the bytes that came."""

    def check_complete(self, elsewhere: Set[str] = frozenset(), /) -> None:
        """Called at the end of the stream.

        Args:
            elsewhere: names of what came by a way that this intake does not know of.

        Raises:
            WeightMismatch: something did not come.
        """


class WholeTensors:
    """A stream of which every tensor comes whole.

    Args:
        declared: what comes, by name; nothing is checked of what was not declared.
    """

    def __init__(self, declared: Mapping[str, TensorSpec]) -> None:
        self._checker = WeightChecker(declared)

    def loads(self, batch: Batch) -> Iterator[Batch]:
        """The batch, a tied tensor under each of its names."""
        yield self._checker.check(batch)

    def past_loader(self) -> Mapping[str, int]:
        """Nothing."""
        return {}

    def check_complete(self, elsewhere: Set[str] = frozenset()) -> None:
        """What was declared has to have come."""
        for name in elsewhere:
            self._checker.note_arrival(name)
        self._checker.check_complete()


class KeptParts:
    """A stream of which only the parts come that this rank keeps.

    Args:
        declared: the declared tensors.
        layout: what comes of them.
    """

    def __init__(self, declared: Sequence[TensorSpec], layout: Sequence[Part]) -> None:
        self._assembly = PartAssembly(declared, layout)
        self._whole = WholeTensors(self._assembly.specs)

    def loads(self, batch: Batch) -> Iterator[Batch]:
        """The tensors of which every part has come."""
        for load in self._assembly.loads(batch):
            yield from self._whole.loads(load)

    def past_loader(self) -> Mapping[str, int]:
        """Nothing."""
        return {}

    def check_complete(self, elsewhere: Set[str] = frozenset()) -> None:
        """The tensors of which the rank keeps something have to have come."""
        self._whole.check_complete(elsewhere)


class PartlyDirect:
    """A stream of which the engine reads what it can into the model; the rest comes in batches.

    Args:
        rest: takes what comes in batches.
        destinations: where tensors are read to.
        known: the tensors from whose load that was learned.
        aliases: names that come beside others, of the same bytes.
    """

    def __init__(
        self, rest: Intake, destinations: Destinations, *, known: Set[str], aliases: Set[str]
    ) -> None:
        self._rest = rest
        self._destinations = destinations
        self._known = known
        self._aliases = aliases
        self._loaded: set[str] = set()

    def loads(self, batch: Batch) -> Iterator[Batch]:
        """What the rest gives, unless it may be loaded over what is read directly."""
        for load in self._rest.loads(batch):
            for name, _ in load:
                self._check_known(name)
            self._loaded.update(name for name, _ in load)
            yield load

    def past_loader(self) -> Mapping[str, int]:
        """What was read."""
        return self._destinations.arrived

    def check_complete(self, elsewhere: Set[str] = frozenset()) -> None:
        """What the model is filled of has to have been read, or loaded."""
        came = self._destinations.arrived.keys() | elsewhere
        for each in self._destinations.wanted:
            if each.regions and each.name not in came and each.name not in self._loaded:
                raise WeightMismatch(
                    f"the stream ended without weights for {each.name!r}",
                    tensor=each.name,
                    remedy="send the same weights in each sync",
                )
        self._rest.check_complete(came)

    def _check_known(self, name: str) -> None:
        if name not in self._known and name not in self._aliases:
            raise WeightMismatch(
                f"weight {name!r} was not in the stream from which it was learned what can be"
                " read directly",
                tensor=name,
                remedy="run the sync again, which learns anew; send the same weights each time",
            )
