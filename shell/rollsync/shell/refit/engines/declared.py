"""What was declared of a stream beforehand, and the sender's check of the stream against it.

Rules kept here: a declared tensor comes in its turn, with the declared dtype and shape, or is not
sent; a declared alias is not sent again; and what was not declared (the weight version, scales that
are computed late) may come between declared tensors, and is checked as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from rollsync.pure.refit import (
    DeclaredPlan,
    TensorSpec,
    check_sent,
    declare,
    describe,
    plan_buckets,
    plan_digest,
)
from rollsync.pure.refit.layout import Part, SentPart, layout_digest, plan_parts
from rollsync.shell.refit.errors import WeightMismatch, accepted
from rollsync.shell.refit.weights import dtype_name


class Layout:
    """What a rollout rank keeps of the declared tensors.

    Args:
        parts: the parts, each under a name by which the rank knows the tensor.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.digest = layout_digest(self.parts)


class Declaration:
    """One side's declaration, as both ends of a stream use it.

    Args:
        specs: the declared tensors in stream order.
        bucket_bytes: size of this side's buffers.

    Raises:
        RefitConfigurationError: no stream can hold these tensors.
    """

    def __init__(self, specs: Sequence[TensorSpec], bucket_bytes: int) -> None:
        planned = accepted(plan_buckets(specs, bucket_bytes))
        self.specs = tuple(specs)
        self.bucket_bytes = bucket_bytes
        self.plan: DeclaredPlan = declare(planned)
        self.digest = plan_digest(self.plan)
        self.index_of = {spec.name: index for index, spec in enumerate(self.specs)}
        self.original_of = {a: i for i, spec in enumerate(self.specs) for a in spec.aliases}
        """By alias, the index of the tensor that it names too."""
        self._parts: dict[str, dict[str, list[SentPart]]] = {}

    def knows(self, layout: str) -> bool:
        """Whether a layout of that digest was learnt."""
        return layout in self._parts

    def learn(self, layout: Layout, rollout_rank: int) -> None:
        """Plan what a rank of this layout is sent.

        Raises:
            RefitConfigurationError: the rank wants what there is not, or some of it twice.
        """
        planned = accepted(plan_parts(self.specs, layout.parts, rank=rollout_rank))
        by_source: dict[str, list[SentPart]] = {}
        for part in planned:
            by_source.setdefault(part.source, []).append(part)
        self._parts[layout.digest] = by_source

    def parts_of(self, layout: str) -> dict[str, list[SentPart]]:
        """By the name of a declared tensor, what of it a rank of a known layout is sent."""
        return self._parts[layout]


class Repeated(Enum):
    """A tensor that the receivers have under this name already."""

    ALIAS = "a declared alias of a tensor that was sent"


class DeclaredOrder:
    """Follows a stream along its declaration.

    Args:
        declaration: None when there is none: then everything may come.
    """

    def __init__(self, declaration: Declaration | None) -> None:
        self._specs = () if declaration is None else declaration.specs
        self._index_of = {} if declaration is None else declaration.index_of
        self._original_of = {} if declaration is None else declaration.original_of
        self._next = 0

    def place(self, name: str, tensor: torch.Tensor) -> TensorSpec | Repeated | None:
        """What the next tensor of the stream was declared as; None when it was not.

        Raises:
            WeightMismatch: another tensor was declared for this place.
        """
        expected = self._specs[self._next] if self._next < len(self._specs) else None
        if expected is not None and name == expected.name:
            _check(expected, name, tensor)
            self._next += 1
            return expected
        original = self._original_of.get(name)
        if original is not None and original < self._next:
            _check(self._specs[original], self._specs[original].name, tensor)
            return Repeated.ALIAS
        if original is None and name not in self._index_of:
            return None
        declared = "the end of the stream" if expected is None else repr(expected.name)
        raise WeightMismatch(
            f"tensor {self._next} was declared as {declared}, and {name!r} is sent",
            tensor=name,
            remedy="declare what is sent, in its order: in the policy's prepare_refit_info, or in"
            " the WeightSource's metadata()",
        )

    def check_complete(self) -> None:
        """Raise `WeightMismatch` if a declared tensor did not come."""
        if self._next < len(self._specs):
            name = self._specs[self._next].name
            raise WeightMismatch(
                f"the stream ended without the declared tensor {name!r}",
                tensor=name,
                remedy="declare what is sent: in the policy's prepare_refit_info, or in the"
                " WeightSource's metadata()",
            )


def _check(declared: TensorSpec, name: str, tensor: torch.Tensor) -> None:
    sent = TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), declared.aliases)
    mistake = check_sent(declared, sent)
    if mistake is not None:
        raise WeightMismatch(describe(mistake), tensor=declared.name)
