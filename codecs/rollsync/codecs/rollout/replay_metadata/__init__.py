"""`rollout.replay-metadata`: the replay index that goes with the saved rows of a data plane."""

from __future__ import annotations

from typing import Final

import msgspec
from returns.result import Failure, Result, Success

from rollsync.codecs.canonical import digest, strictly_increasing
from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.rollout.replay_metadata import v1
from rollsync.pure.rollout.checkpointing import TQReplayGroupState, TQReplayMetadataState


def replay_manifest_digest(groups: tuple[TQReplayGroupState, ...]) -> str:
    """The digest that `TQReplayMetadataState.manifest_digest` has to be, hexadecimal."""
    return digest(v1.Groups(groups=_wire_groups(groups)))


def to_wire(state: TQReplayMetadataState) -> v1.ReplayMetadata:
    """The state as it is.

    Raises:
        ValueError: Its digest is not that of its groups.
    """
    groups = _wire_groups(state.groups)
    if state.manifest_digest != digest(v1.Groups(groups=groups)):
        raise ValueError("manifest_digest is to be replay_manifest_digest(groups)")
    return v1.ReplayMetadata(
        schema_version=state.schema_version,
        storage_kind=state.storage_kind,
        partition_id=state.partition_id,
        saved_capacity=state.saved_capacity,
        manifest_digest=state.manifest_digest,
        groups=groups,
    )


def from_wire(wire: v1.ReplayMetadata) -> Result[TQReplayMetadataState, Refusal]:
    """The state, provided that its digest is that of its groups."""
    for group in wire.groups:
        if not strictly_increasing(group.fields):
            return Failure("fields are sorted, each once")
        if not strictly_increasing([name for name, _ in group.tags]):
            return Failure("tags are sorted by name, each once")
    if wire.manifest_digest != digest(v1.Groups(groups=wire.groups)):
        return Failure("manifest_digest is the digest of groups")
    return Success(msgspec.convert(wire, TQReplayMetadataState, from_attributes=True))


def _wire_groups(groups: tuple[TQReplayGroupState, ...]) -> tuple[v1.Group, ...]:
    return msgspec.convert(groups, tuple[v1.Group, ...], from_attributes=True)


REPLAY_METADATA: Final = kind(
    "rollout.replay-metadata",
    domain=TQReplayMetadataState,
    history=first(v1.ReplayMetadata),
    to_wire=to_wire,
    from_wire=from_wire,
)
