"""Sample values of `rollout.data-plane-checkpoint`."""

from __future__ import annotations

from typing import Final

from rollsync.pure.rollout.checkpointing import CheckpointKind, DataPlaneCheckpointMetadata
from tests.codecs.samples.recovery_ledger import LARGEST


def _metadata(number: int, text: str, mode: CheckpointKind) -> DataPlaneCheckpointMetadata:
    return DataPlaneCheckpointMetadata(
        schema_version=1,
        train_steps=number,
        trainer_version=number,
        current_epoch=number,
        partition_id=text,
        sampler_name=text,
        mode=mode,
        replay_digest="0a" * 32,
        replay_group_count=number,
        ledger_schema_version=1,
        ledger_digest="f9" * 32,
        ledger_group_count=number,
    )


SAMPLES: Final = {
    "full": _metadata(3, "in_order", CheckpointKind.TRAINER_CHECKPOINT),
    "empty": _metadata(0, "", CheckpointKind.ROLLOUT_SNAPSHOT),
    "extremes": _metadata(LARGEST, "in_order", CheckpointKind.ROLLOUT_SNAPSHOT),
    "non-ascii": _metadata(1, "采样器-é", CheckpointKind.ROLLOUT_SNAPSHOT),
}
