"""Version 1 of a bundle's manifest."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rollsync.codecs.canonical import Natural, Sha256Hex, Wire

DispatchIndex = Annotated[int, Meta(ge=-1, le=2**63 - 1)]


class File(Wire, frozen=True, kw_only=True):
    """A file of the bundle."""

    name: str
    size_bytes: Natural
    digest: Sha256Hex


class Segment(Wire, frozen=True, kw_only=True):
    """A row segment that the bundle needs."""

    digest: Sha256Hex
    size_bytes: Natural


class Manifest(Wire, frozen=True, kw_only=True):
    """What a bundle holds, and of which moment of which run."""

    schema_version: Natural
    base_train_step: Natural
    trainer_version: Natural
    current_epoch: Natural
    sampler_dispatch_index: DispatchIndex
    mutation_version: Natural
    rolled_back_train_group_count: Natural
    bootstrap_fingerprint: Sha256Hex | None
    environment_fingerprint: str | None
    kind: Literal["trainer_checkpoint", "rollout_snapshot"]
    files: tuple[File, ...]
    segments: tuple[Segment, ...]
