"""What is known of a rank's loader from one stream to the next.

A first load, of whole tensors, is watched. What was seen tells two things for the streams that
follow: which part of each tensor the rank keeps, so that it is sent no more, and which tensors the
loader only copies, so that an engine may read them straight into the model.

Rule kept here: the first load of a tensor's parts is watched too, as a loader that reads anything
else of it would read what never came.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.errors import OtherPartsRead
from rollsync.pure.refit.kept import kept_bytes, kept_layout
from rollsync.pure.refit.layout import Part, whole
from rollsync.pure.refit.load_plan import LoadPlan


class Learned(Struct, frozen=True):
    """What a watched load of the declared tensors has taught.

    Attributes:
        plan: What can be read directly; of no tensors when nothing can.
        layout: The parts that the rank keeps; None when it is to be sent all of every tensor.
        unconfirmed: The tensors that come in parts from now on, and were not loaded from these yet.
    """

    plan: LoadPlan
    layout: tuple[Part, ...] | None = None
    unconfirmed: frozenset[str] = frozenset()


def is_to_be_watched(known: Learned | None, *, in_parts: bool, directly: bool) -> bool:
    """Whether the next load can teach anything.

    Args:
        known: What is known; None after no whole load, or when that no longer holds.
        in_parts: Whether what the rank keeps can be told: its model is shared by several ranks, and
            the tensors are declared.
        directly: Whether the engine may read tensors straight into the model.
    """
    if known is None:
        return in_parts or directly
    return bool(known.unconfirmed)


def learn(declared: Sequence[TensorSpec], seen: LoadPlan, *, is_shared: bool) -> Learned:
    """What follows from a load of whole tensors.

    Args:
        declared: The tensors of the stream.
        seen: What the loader did with them.
        is_shared: Whether several ranks share the model, so that each keeps parts of it.
    """
    # What is one tensor in this stream may be two in the next, unless it was declared.
    plan = LoadPlan() if undeclared_ties(declared, seen) else seen
    layout = kept_layout(declared, seen) if is_shared else ()
    everything = sum(spec.tensor_bytes for spec in declared)
    if not is_shared or kept_bytes(declared, layout) >= everything:
        return Learned(plan)
    wholes = {Part(spec.name, whole(spec)) for spec in declared}
    in_parts = {part.name for part in layout if part not in wholes}
    return Learned(plan, layout, frozenset(s.name for s in declared if s.name in in_parts))


def confirm(
    known: Learned, declared: Sequence[TensorSpec], seen: LoadPlan
) -> Result[Learned, OtherPartsRead]:
    """What is known after a load of parts, of which the loader has to have read exactly these.

    Args:
        known: What was known before.
        declared: The tensors of the stream.
        seen: What the loader did with those that it was given.
    """
    loaded = [
        spec for spec in declared if spec.name in known.unconfirmed and spec.name in seen.tensors
    ]
    names = {name for spec in loaded for name in spec.names}
    sent = {part for part in known.layout or () if part.name in names}
    different = sent.symmetric_difference(kept_layout(loaded, seen))
    if different:
        return Failure(OtherPartsRead(tensor=min(part.name for part in different)))
    return Success(replace(known, unconfirmed=known.unconfirmed - names))


def undeclared_ties(declared: Sequence[TensorSpec], seen: LoadPlan) -> frozenset[str]:
    """Names that came with the bytes of another tensor and were not declared as its aliases."""
    return seen.tied - {alias for spec in declared for alias in spec.aliases}
