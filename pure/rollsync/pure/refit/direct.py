"""What a receiver reads straight from the sender's memory into its parameters.

Rules kept here: only what a load plan calls direct, and only copies of which either side lies in
one run, or both in equal runs; and an offer is taken once, of a size that was agreed on before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from typing import Literal

import msgspec
from msgspec import Struct

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.control import Destination, OfferedTensor
from rollsync.pure.refit.load_plan import Copy, LoadPlan


class OfferMistake(Struct, frozen=True, kw_only=True):
    """An offered tensor that has no place here."""

    tensor: str
    reason: Literal["unknown", "repeated", "other size", "no checksum"]


class ExpectedOffer(Struct, frozen=True, gc=False):
    """What an offer of a tensor has to have.

    Attributes:
        tensor_bytes: Bytes of the whole tensor.
        is_read: Whether anything of it is read, so that there is something to hash.
        read_bytes: Bytes that are read of it.
    """

    tensor_bytes: int
    is_read: bool
    read_bytes: int


def expected_of(destinations: Sequence[Destination]) -> dict[str, ExpectedOffer]:
    """What is expected of the tensors that are offered, by name."""
    return {
        each.name: ExpectedOffer(
            tensor_bytes=TensorSpec(each.name, each.shape, each.dtype).tensor_bytes,
            is_read=bool(each.regions),
            read_bytes=sum(region.total_bytes for region in each.regions),
        )
        for each in destinations
    }


def can_be_read(copy: Copy) -> bool:
    """Whether a copy can be done by reads of a few runs each."""
    source, target = copy.source, copy.target
    return source.runs == 1 or target.runs == 1 or source.run_bytes == target.run_bytes


def destinations_of(plan: LoadPlan) -> tuple[Destination, ...]:
    """The tensors that need no loader, in stream order; of some, nothing is read."""
    return tuple(
        Destination(
            name=name,
            shape=each.spec.shape,
            dtype=each.spec.dtype,
            regions=tuple(copy.source for copy in each.copies),
        )
        for name, each in plan.direct.items()
        if all(can_be_read(copy) for copy in each.copies)
    )


def destinations_digest(destinations: Sequence[Destination]) -> str:
    """SHA-256 of the destinations, in hexadecimal."""
    return hashlib.sha256(msgspec.msgpack.encode(destinations)).hexdigest()


def check_offered(
    expected: Mapping[str, ExpectedOffer],
    taken: Set[str],
    offered: OfferedTensor,
    *,
    checksums: bool,
) -> OfferMistake | None:
    """What is wrong with an offered tensor.

    Args:
        expected: what was agreed on, by name.
        taken: the names that were offered before in this stream.
        checksums: whether what is read has to carry one.
    """
    known = expected.get(offered.name)
    if known is None:
        return OfferMistake(tensor=offered.name, reason="unknown")
    if offered.name in taken:
        return OfferMistake(tensor=offered.name, reason="repeated")
    if offered.size_bytes != known.tensor_bytes:
        return OfferMistake(tensor=offered.name, reason="other size")
    if checksums and known.is_read and offered.checksum is None:
        return OfferMistake(tensor=offered.name, reason="no checksum")
    return None
