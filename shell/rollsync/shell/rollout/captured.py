"""What a save says about its replay index and its rows, beside the state itself.

Two more files of a bundle, so that another program can read which rows belong to which group
without the state. They describe what the newest link of the state's chain brings: everything beside
a whole state, what changed beside a difference. Rule kept here: both are derived from the state and
the rows of one cut, and tied to it by digests and counts, so that parts of two saves do not pass
for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from msgspec import Struct
from msgspec.structs import replace

from rollsync.codecs import encode
from rollsync.codecs.rollout.recovery_ledger import RECOVERY_LEDGER
from rollsync.codecs.rollout.replay_metadata import replay_manifest_digest
from rollsync.pure.rollout.checkpointing import (
    CapturedRolloutState,
    CheckpointKind,
    DataPlaneCheckpointMetadata,
    TQReplayGroupState,
    TQReplayMetadataState,
)
from rollsync.pure.rollout.newest import NewestPart
from rollsync.pure.rollout.row_segments import SavedRow
from rollsync.pure.rollout.sampler import PromptGroupSampler
from rollsync.pure.rollout.state import ReplayGroup, RolloutState

REPLAY_METADATA_FILE = "replay_metadata.bin"
"""One envelope of kind `rollout.replay-metadata`."""
DATA_PLANE_FILE = "data_plane.bin"
"""One envelope of kind `rollout.data-plane-checkpoint`."""
_SCHEMA_VERSION = 1
_STORAGE_KIND = "safetensors-segments"


class SavingRun(Struct, frozen=True, kw_only=True):
    """What a save has to know of the run beside its state."""

    partition_id: str
    sampler_name: str
    buffer_capacity: int | None
    environment_fingerprint: str | None


def name_of(sampler: PromptGroupSampler) -> str:
    """A built-in policy's name in configurations, or the class of a user's."""
    if isinstance(sampler, Struct):
        tag = sampler.__struct_config__.tag
        if isinstance(tag, str):
            return tag
    return f"{type(sampler).__module__}:{type(sampler).__qualname__}"


def captured_state(
    state: RolloutState,
    newest: NewestPart,
    rows: Mapping[str, SavedRow],
    run: SavingRun,
    *,
    replay_row_count: int,
    rolled_back_train_group_count: int,
    mutation_version: int,
    rows_save_s: float,
) -> CapturedRolloutState:
    """The capture in NeMo-RL's terms. Costs as much as `newest` has.

    Args:
        newest: what the save's link of the state brings.
        rows: every saved row.
    """
    return CapturedRolloutState(
        dataloader_state=state.dataloader_state,
        sampler_dispatch_index=state.sampler_dispatch_index,
        next_nemo_gym_task_index=state.next_nemo_gym_task_index,
        replacement_reserve=state.runtime.replacement_reserve,
        replay_metadata=_replay_metadata(newest, rows, run),
        rollout_recovery_payload=encode(newest.ledger),
        rollout_recovery_group_count=len(state.ledger.groups),
        replay_row_count=replay_row_count,
        staging_row_count=len(rows) - replay_row_count,
        rolled_back_train_group_count=rolled_back_train_group_count,
        mutation_version=mutation_version,
        tq_save_seconds=rows_save_s,
        state=state,
    )


def data_plane_metadata(
    captured: CapturedRolloutState, run: SavingRun, kind: CheckpointKind
) -> DataPlaneCheckpointMetadata:
    """What ties the saved rows to the rest of the save."""
    progress = captured.state.progress
    replay = captured.replay_metadata
    payload = captured.rollout_recovery_payload
    if replay is None or payload is None:
        raise TypeError("a capture without replay index or ledger is not saved")
    return DataPlaneCheckpointMetadata(
        schema_version=_SCHEMA_VERSION,
        train_steps=progress.train_steps,
        trainer_version=progress.trainer_version,
        current_epoch=progress.current_epoch,
        partition_id=run.partition_id,
        sampler_name=run.sampler_name,
        mode=kind,
        replay_digest=replay.manifest_digest,
        replay_group_count=len(captured.state.replay),
        ledger_schema_version=RECOVERY_LEDGER.newest_version,
        ledger_digest=sha256(payload).hexdigest(),
        ledger_group_count=len(captured.state.ledger.groups),
    )


def disagreement(
    state: RolloutState,
    newest: NewestPart,
    replay: TQReplayMetadataState,
    metadata: DataPlaneCheckpointMetadata,
    kind: CheckpointKind,
) -> tuple[str, str] | None:
    """The first field in which a bundle's files are not of one save, with what is wrong; None when
    they agree.

    Args:
        newest: what the last link of the state brings.
    """
    progress = state.progress
    for field, said, found in (
        ("mode", metadata.mode, kind),
        ("train_steps", metadata.train_steps, progress.train_steps),
        ("trainer_version", metadata.trainer_version, progress.trainer_version),
        ("current_epoch", metadata.current_epoch, progress.current_epoch),
        ("replay_digest", metadata.replay_digest, replay.manifest_digest),
        ("replay_group_count", metadata.replay_group_count, len(state.replay)),
        ("ledger_group_count", metadata.ledger_group_count, len(state.ledger.groups)),
    ):
        if said != found:
            return field, f"{said}, the other files have {found}"
    expected = [_group(group, fields=(), tags=()) for group in newest.replay]
    listed = [_bare(group) for group in replay.groups]
    if expected != listed:
        return "groups", f"{len(listed)} groups that are not those of the state"
    # The digest of the ledger depends on the schema version that it was written in.
    if metadata.ledger_schema_version == RECOVERY_LEDGER.newest_version:
        digest = sha256(encode(newest.ledger)).hexdigest()
        if metadata.ledger_digest != digest:
            return "ledger_digest", f"{metadata.ledger_digest}, the state's ledger has {digest}"
    return None


def _replay_metadata(
    newest: NewestPart, rows: Mapping[str, SavedRow], run: SavingRun
) -> TQReplayMetadataState:
    groups = tuple(
        _group(group, fields=rows[first].fields, tags=rows[first].tags)
        for group in newest.replay
        for first in group.sample_ids[:1]
    )
    return TQReplayMetadataState(
        schema_version=_SCHEMA_VERSION,
        storage_kind=_STORAGE_KIND,
        partition_id=run.partition_id,
        saved_capacity=run.buffer_capacity,
        manifest_digest=replay_manifest_digest(groups),
        groups=groups,
    )


def _group(
    group: ReplayGroup, *, fields: tuple[str, ...], tags: tuple[tuple[str, str], ...]
) -> TQReplayGroupState:
    return TQReplayGroupState(
        group_id=group.group_id,
        sample_ids=group.sample_ids,
        start_weight_version=group.start_weight_version,
        end_weight_version=group.end_weight_version,
        target_step=group.target_step,
        lengths=group.lengths,
        fields=fields,
        tags=tags,
    )


def _bare(group: TQReplayGroupState) -> TQReplayGroupState:
    return replace(group, fields=(), tags=())
