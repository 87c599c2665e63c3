"""Version 1 of the replay metadata: the ready groups, in commit order."""

from __future__ import annotations

from rollsync.codecs.canonical import Natural, Sha256Hex, Wire


class Group(Wire, frozen=True, kw_only=True):
    """One ready group, as the data plane's metadata describes it."""

    group_id: str
    sample_ids: tuple[str, ...]
    start_weight_version: Natural
    end_weight_version: Natural
    target_step: Natural | None
    lengths: tuple[Natural, ...]
    fields: tuple[str, ...]
    """Sorted."""
    tags: tuple[tuple[str, str], ...]
    """Name and value, sorted by name."""


class Groups(Wire, frozen=True, kw_only=True):
    """What the manifest digest is taken of."""

    groups: tuple[Group, ...]


class ReplayMetadata(Wire, frozen=True, kw_only=True):
    """The replay index beside the saved rows of a data plane."""

    schema_version: Natural
    storage_kind: str
    partition_id: str
    saved_capacity: Natural | None
    manifest_digest: Sha256Hex
    groups: tuple[Group, ...]
