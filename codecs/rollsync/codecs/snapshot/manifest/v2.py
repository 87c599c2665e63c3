"""Version 2 of a bundle's manifest: the rollout state may lie in segments, as rows do."""

from __future__ import annotations

from typing import Literal

from rollsync.codecs.canonical import Natural, Sha256Hex, Wire
from rollsync.codecs.snapshot.manifest import v1


class Manifest(Wire, frozen=True, kw_only=True):
    """What a bundle holds, and of which moment of which run."""

    schema_version: Natural
    base_train_step: Natural
    trainer_version: Natural
    current_epoch: Natural
    sampler_dispatch_index: v1.DispatchIndex
    mutation_version: Natural
    rolled_back_train_group_count: Natural
    bootstrap_fingerprint: Sha256Hex | None
    environment_fingerprint: str | None
    kind: Literal["trainer_checkpoint", "rollout_snapshot"]
    files: tuple[v1.File, ...]
    segments: tuple[v1.Segment, ...]
    state_segments: tuple[v1.Segment, ...]


def from_v1(old: v1.Manifest) -> Manifest:
    """A manifest of version 1 has its state in a file of the bundle, and in no segment."""
    return Manifest(
        schema_version=old.schema_version,
        base_train_step=old.base_train_step,
        trainer_version=old.trainer_version,
        current_epoch=old.current_epoch,
        sampler_dispatch_index=old.sampler_dispatch_index,
        mutation_version=old.mutation_version,
        rolled_back_train_group_count=old.rolled_back_train_group_count,
        bootstrap_fingerprint=old.bootstrap_fingerprint,
        environment_fingerprint=old.environment_fingerprint,
        kind=old.kind,
        files=old.files,
        segments=old.segments,
        state_segments=(),
    )
