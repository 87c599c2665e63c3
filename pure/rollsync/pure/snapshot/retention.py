"""Which bundles and segments go, and which stay whatever the limits say.

Rules kept here, in the order of their weight:

1. Nothing that is protected goes: the bundle that this run resumed from, and what is being written.
   Nor does the newest whole bundle.
2. An anchor stays as long as one of its snapshots does.
3. A segment stays as long as a bundle that stays lists it, or might: as long as one that stays
   has no readable manifest, every segment stays.
4. Damaged bundles do not count towards a limit. They go once a newer one is whole.
5. What is not certain is neither counted nor removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from rollsync.pure.config import RetentionConfig
from rollsync.pure.snapshot.places import BundlePlace


class BundleCondition(StrEnum):
    """What is known of a bundle."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    """It could not be read just now, or when this run chose what to resume from, or it is not
    known to survive a power failure."""


class ListedBundle(Struct, frozen=True, kw_only=True):
    """A bundle on disk."""

    place: BundlePlace
    condition: BundleCondition
    segments: tuple[str, ...] | None
    """None: its manifest cannot be read."""


class RetentionPlan(Struct, frozen=True, kw_only=True):
    """What is removed, in this order."""

    anchors: tuple[int, ...]
    """Steps whose checkpoint goes, with everything under it; oldest first."""
    snapshots: tuple[BundlePlace, ...]
    """Snapshots that go while their anchor stays; oldest first."""
    segments: tuple[str, ...]


def plan_retention(
    bundles: Iterable[ListedBundle],
    limits: RetentionConfig,
    *,
    protected: Iterable[BundlePlace] = (),
    segments: Iterable[str] = (),
    protected_segments: Iterable[str] = (),
) -> RetentionPlan:
    """What goes.

    Args:
        bundles: everything in the run directory, each place once.
        protected: the bundle that this run resumed from, and those that are being written.
        segments: every segment on disk.
        protected_segments: those of a save under way.
    """
    listed = {bundle.place: bundle for bundle in bundles}
    kept = _kept_places(listed, limits, frozenset(protected))
    steps = {place.step for place in listed if place.step > 0}
    anchors = tuple(sorted(steps - {place.step for place in kept}))
    gone = [place for place in listed if place not in kept and place.step not in anchors]
    return RetentionPlan(
        anchors=anchors,
        snapshots=tuple(sorted(place for place in gone if place.is_snapshot)),
        segments=_free_segments(
            [bundle for place, bundle in listed.items() if place in kept],
            segments,
            frozenset(protected_segments),
        ),
    )


def _kept_places(
    listed: dict[BundlePlace, ListedBundle],
    limits: RetentionConfig,
    protected: frozenset[BundlePlace],
) -> frozenset[BundlePlace]:
    whole = sorted(
        (place for place, each in listed.items() if each.condition is BundleCondition.WHOLE),
        reverse=True,
    )
    if not whole:
        return frozenset(listed)
    kept = {place for place, each in listed.items() if each.condition is BundleCondition.UNKNOWN}
    # A damaged bundle may still be put right by hand as long as nothing newer makes it useless.
    kept |= {place for place in listed if place > whole[0]}
    kept |= protected
    steps = sorted({place.step for place in whole}, reverse=True)[: limits.trainer_checkpoints]
    for step in steps:
        snapshots = [place for place in whole if place.step == step and place.is_snapshot]
        kept.update(snapshots[: limits.snapshots_per_checkpoint])
        kept.add(BundlePlace(step=step, number=0))
    kept.update(place.anchor for place in tuple(kept))
    return frozenset(kept)


def _free_segments(
    kept: list[ListedBundle], segments: Iterable[str], protected: frozenset[str]
) -> tuple[str, ...]:
    needed = set(protected)
    for bundle in kept:
        if bundle.segments is None:
            return ()
        needed.update(bundle.segments)
    return tuple(sorted(name for name in segments if name not in needed))
