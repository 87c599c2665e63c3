"""`rollout.data-plane-checkpoint`: what ties a data plane's saved part to the rest of its save."""

from __future__ import annotations

from typing import Final

import msgspec
from returns.result import Result, Success

from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.rollout.data_plane_checkpoint import v1
from rollsync.pure.rollout.checkpointing import DataPlaneCheckpointMetadata


def to_wire(metadata: DataPlaneCheckpointMetadata) -> v1.DataPlaneCheckpoint:
    """The metadata as it is.

    Raises:
        ValueError: A count is negative, or a digest is none.
    """
    return msgspec.convert(metadata, v1.DataPlaneCheckpoint, from_attributes=True)


def from_wire(
    wire: v1.DataPlaneCheckpoint,
) -> Result[DataPlaneCheckpointMetadata, Refusal]:
    """The metadata; every value that fits the schema is legal."""
    return Success(msgspec.convert(wire, DataPlaneCheckpointMetadata, from_attributes=True))


DATA_PLANE_CHECKPOINT: Final = kind(
    "rollout.data-plane-checkpoint",
    domain=DataPlaneCheckpointMetadata,
    history=first(v1.DataPlaneCheckpoint),
    to_wire=to_wire,
    from_wire=from_wire,
)
