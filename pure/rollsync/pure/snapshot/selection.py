"""What a run resumes from: which bundle is looked at first, and what speaks against one.

Rules kept here: the highest trainer step first, under it the newest snapshot, and the trainer
checkpoint's own state after its snapshots; a bundle that is passed over leaves its reason; a
bundle of another run, step or version is none of this one's.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.manifest import (
    MANIFEST_SCHEMA_VERSION,
    RolloutSnapshotManifest,
    unsafe_name,
)
from rollsync.pure.snapshot.places import BundlePlace


class RefusedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that was passed over."""

    path: str
    why: str


def resume_order(places: Iterable[BundlePlace]) -> tuple[BundlePlace, ...]:
    """The places in the order in which a resume tries them."""
    return tuple(sorted(places, reverse=True))


def why_not_of_place(manifest: RolloutSnapshotManifest, place: BundlePlace) -> str | None:
    """Why a bundle that lies at `place` is not the one that its manifest describes, or None."""
    expected = (
        CheckpointKind.ROLLOUT_SNAPSHOT if place.is_snapshot else CheckpointKind.TRAINER_CHECKPOINT
    )
    if manifest.schema_version > MANIFEST_SCHEMA_VERSION:
        return (
            f"its layout is version {manifest.schema_version}, this rollsync reads up to "
            f"{MANIFEST_SCHEMA_VERSION}"
        )
    if manifest.kind is not expected:
        return f"its manifest is that of a {manifest.kind}, not of a {expected}"
    if manifest.base_train_step != place.step:
        return f"its manifest is of step {manifest.base_train_step}, not of step {place.step}"
    for file in manifest.files:
        why = unsafe_name(file.name)
        if why is not None:
            return why
    if len({segment.digest for segment in manifest.segments}) != len(manifest.segments):
        return "its manifest lists a segment twice"
    return None


def why_not_on_anchor(
    manifest: RolloutSnapshotManifest, anchor: RolloutSnapshotManifest
) -> str | None:
    """Why a snapshot does not continue from its anchor's weights, or None."""
    if manifest.trainer_version != anchor.trainer_version:
        return (
            f"it is of trainer version {manifest.trainer_version}, its checkpoint of "
            f"{anchor.trainer_version}"
        )
    return None


def why_not_of_run(manifest: RolloutSnapshotManifest, fingerprint: str) -> str | None:
    """Why a bundle is not one of the run with this fingerprint, or None."""
    if manifest.bootstrap_fingerprint != fingerprint:
        return (
            f"it belongs to a run with fingerprint {manifest.bootstrap_fingerprint}, this run's is "
            f"{fingerprint}"
        )
    return None
