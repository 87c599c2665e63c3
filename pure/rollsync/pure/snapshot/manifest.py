"""What a bundle says about itself: the manifest, and the facts that a resume reads first.

A bundle is one directory: a trainer checkpoint with the rollout state of the same step, or a
rollout snapshot between two of them. Rule kept here: a manifest names every file of its bundle and
every segment that it shares with others, each with size and digest, so that what verifies is
exactly what was written.
"""

from __future__ import annotations

from msgspec import Struct

from rollsync.pure.rollout.checkpointing import CheckpointKind

MANIFEST_SCHEMA_VERSION = 2
"""Of the layout that the manifest describes: which files a bundle has and what they mean."""
MANIFEST_FILE = "manifest.bin"
SNAPSHOTS_DIRECTORY = "snapshots"
"""In an anchor's directory: the snapshots that are resumed from its weights."""


class BundleFacts(Struct, frozen=True, kw_only=True):
    """What a bundle's manifest says beside its list of files."""

    kind: CheckpointKind
    base_train_step: int
    trainer_version: int
    current_epoch: int
    sampler_dispatch_index: int
    mutation_version: int
    rolled_back_train_group_count: int
    environment_fingerprint: str | None
    segments: tuple[str, ...]
    """Row segments, oldest first: of a row that is in several, the last counts."""
    state_segments: tuple[str, ...]
    """The chain of the rollout state (`rollsync.pure.snapshot.chain`): a base, then differences.
    Empty in bundles of layout 1, which have a file of their own for it."""


class SnapshotFile(Struct, frozen=True, kw_only=True):
    """A file of the bundle."""

    name: str
    """Relative to the bundle's directory, parts joined by `/`."""
    size_bytes: int
    digest: str
    """SHA-256 of the content, hexadecimal."""


class SnapshotSegment(Struct, frozen=True, kw_only=True):
    """A file that bundles of the run share, named by the digest of its content."""

    digest: str
    size_bytes: int


class RolloutSnapshotManifest(Struct, frozen=True, kw_only=True):
    """A bundle's manifest. The first fields are NeMo-RL's; the last four go beyond it."""

    schema_version: int
    base_train_step: int
    trainer_version: int
    current_epoch: int
    sampler_dispatch_index: int
    mutation_version: int
    rolled_back_train_group_count: int
    bootstrap_fingerprint: str | None
    """Of the run that the bundle belongs to; see `rollsync.pure.snapshot.lineage`."""
    environment_fingerprint: str | None
    kind: CheckpointKind
    files: tuple[SnapshotFile, ...]
    """Every file but the manifest, sorted by name."""
    segments: tuple[SnapshotSegment, ...]
    """Of rows, oldest first."""
    state_segments: tuple[SnapshotSegment, ...]
    """Of the rollout state: its base, then differences, oldest first; one may come twice."""

    @property
    def shared(self) -> tuple[SnapshotSegment, ...]:
        """Every segment that the bundle needs, each once."""
        each = {segment.digest: segment for segment in (*self.state_segments, *self.segments)}
        return tuple(each.values())

    @property
    def facts(self) -> BundleFacts:
        """What is said beside the list of files."""
        return BundleFacts(
            kind=self.kind,
            base_train_step=self.base_train_step,
            trainer_version=self.trainer_version,
            current_epoch=self.current_epoch,
            sampler_dispatch_index=self.sampler_dispatch_index,
            mutation_version=self.mutation_version,
            rolled_back_train_group_count=self.rolled_back_train_group_count,
            environment_fingerprint=self.environment_fingerprint,
            segments=tuple(segment.digest for segment in self.segments),
            state_segments=tuple(segment.digest for segment in self.state_segments),
        )


def manifest_of(
    facts: BundleFacts,
    *,
    fingerprint: str,
    files: tuple[SnapshotFile, ...],
    segments: tuple[SnapshotSegment, ...],
    state_segments: tuple[SnapshotSegment, ...],
) -> RolloutSnapshotManifest:
    """The manifest of a bundle with these files, in any order.

    Args:
        segments: in the order of `facts.segments`.
        state_segments: in the order of `facts.state_segments`.
    """
    return RolloutSnapshotManifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        base_train_step=facts.base_train_step,
        trainer_version=facts.trainer_version,
        current_epoch=facts.current_epoch,
        sampler_dispatch_index=facts.sampler_dispatch_index,
        mutation_version=facts.mutation_version,
        rolled_back_train_group_count=facts.rolled_back_train_group_count,
        bootstrap_fingerprint=fingerprint,
        environment_fingerprint=facts.environment_fingerprint,
        kind=facts.kind,
        files=tuple(sorted(files, key=lambda file: file.name)),
        segments=segments,
        state_segments=state_segments,
    )


def unsafe_name(name: str) -> str | None:
    """Why a bundle may not have a file of this name, or None.

    What a manifest names is opened, so a name may not lead out of the bundle.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name or "\\" in name:
        return f"file name {name!r} is no plain relative path"
    if any("\ud800" <= character <= "\udfff" for character in name):
        # So Python shows the bytes of a name that are no UTF-8; no manifest could hold them.
        return f"file name {name!r} is not UTF-8"
    if name == MANIFEST_FILE:
        return f"{MANIFEST_FILE} is the manifest's own name"
    if parts[0] == SNAPSHOTS_DIRECTORY:
        return f"{SNAPSHOTS_DIRECTORY}/ holds the snapshots of a checkpoint, not its files"
    return None


_ROLLOUT_FILES = frozenset({"rollout_state.bin", "replay_metadata.bin", "data_plane.bin"})
_ENVIRONMENT_DIRECTORY = "environment"


def is_of_rollout(name: str) -> bool:
    """Whether a bundle's file holds rollout state. All others of a checkpoint are the trainer's,
    and these alone do its snapshots continue from: each has rollout state of its own."""
    return name in _ROLLOUT_FILES or name.split("/")[0] == _ENVIRONMENT_DIRECTORY
