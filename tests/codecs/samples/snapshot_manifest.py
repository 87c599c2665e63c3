"""Sample values of `snapshot.manifest`."""

from __future__ import annotations

from typing import Final

from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.manifest import (
    RolloutSnapshotManifest,
    SnapshotFile,
    SnapshotSegment,
)
from tests.codecs.samples.recovery_ledger import LARGEST


def _manifest(
    number: int,
    *,
    dispatch_index: int,
    kind: CheckpointKind = CheckpointKind.ROLLOUT_SNAPSHOT,
    fingerprint: str | None = None,
    environment: str | None = None,
    files: tuple[SnapshotFile, ...] = (),
    segments: tuple[SnapshotSegment, ...] = (),
    state_segments: tuple[SnapshotSegment, ...] = (),
) -> RolloutSnapshotManifest:
    return RolloutSnapshotManifest(
        schema_version=2,
        base_train_step=number,
        trainer_version=number,
        current_epoch=number,
        sampler_dispatch_index=dispatch_index,
        mutation_version=number,
        rolled_back_train_group_count=number,
        bootstrap_fingerprint=fingerprint,
        environment_fingerprint=environment,
        kind=kind,
        files=files,
        segments=segments,
        state_segments=state_segments,
    )


def _file(name: str, size_bytes: int = 3) -> SnapshotFile:
    return SnapshotFile(name=name, size_bytes=size_bytes, digest="0a" * 32)


SAMPLES: Final = {
    "full": _manifest(
        3,
        dispatch_index=2,
        kind=CheckpointKind.TRAINER_CHECKPOINT,
        fingerprint="f9" * 32,
        environment="guessing-1",
        files=(_file("data_plane.bin"), _file("environment/episodes")),
        segments=(
            SnapshotSegment(digest="1b" * 32, size_bytes=70000),
            SnapshotSegment(digest="0c" * 32, size_bytes=5),
        ),
        state_segments=(
            SnapshotSegment(digest="5a" * 32, size_bytes=4000),
            SnapshotSegment(digest="4b" * 32, size_bytes=300),
            SnapshotSegment(digest="4b" * 32, size_bytes=300),
        ),
    ),
    "empty": _manifest(0, dispatch_index=-1),
    "extremes": _manifest(
        LARGEST,
        dispatch_index=LARGEST,
        files=(_file("rollout_state.bin", LARGEST),),
        segments=(SnapshotSegment(digest="ff" * 32, size_bytes=LARGEST),),
        state_segments=(SnapshotSegment(digest="00" * 32, size_bytes=LARGEST),),
    ),
    "non-ascii": _manifest(1, dispatch_index=0, environment="环境-é", files=(_file("é/模型"),)),
}
