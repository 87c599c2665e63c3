"""Sample values of `rollout.replay-metadata`."""

from __future__ import annotations

from typing import Final

from rollsync.codecs.rollout.replay_metadata import replay_manifest_digest
from rollsync.pure.rollout.checkpointing import TQReplayGroupState, TQReplayMetadataState
from tests.codecs.samples.recovery_ledger import LARGEST


def metadata(*groups: TQReplayGroupState, capacity: int | None = None) -> TQReplayMetadataState:
    """Metadata of these groups, with their digest."""
    return TQReplayMetadataState(
        schema_version=1,
        storage_kind="safetensors_segments",
        partition_id="train",
        saved_capacity=capacity,
        manifest_digest=replay_manifest_digest(groups),
        groups=groups,
    )


FULL: Final = metadata(
    TQReplayGroupState(
        group_id="group-d",
        sample_ids=("group-d/0", "group-d/1"),
        start_weight_version=1,
        end_weight_version=2,
        target_step=3,
        lengths=(512, 37),
        fields=("input_ids", "logprobs"),
        tags=(("environment", "countdown"), ("masked", "1")),
    ),
    TQReplayGroupState(
        group_id="group-c",
        sample_ids=("group-c/0", "group-c/1"),
        start_weight_version=2,
        end_weight_version=2,
        target_step=4,
        lengths=(1, 2),
        fields=("input_ids",),
    ),
    capacity=64,
)


def _group(text: str, number: int) -> TQReplayGroupState:
    return TQReplayGroupState(
        group_id=text,
        sample_ids=(text,),
        start_weight_version=number,
        end_weight_version=number,
        target_step=None,
        lengths=(number,),
        fields=(text,),
        tags=((text, text),),
    )


SAMPLES: Final = {
    "full": FULL,
    "empty": metadata(),
    "extremes": metadata(_group("", LARGEST), _group("", 0), capacity=LARGEST),
    "non-ascii": metadata(_group("групп-𝄞", 1), capacity=0),
}
