"""The records that saving and restoring pass around and print.

Names and fields follow the reference's API pages (NeMo-RL, single-controller rollout
checkpointing); what goes beyond it says so.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from msgspec import Struct
from rpds import Queue

from rollsync.pure.rollout.state import DataloaderState, PromptReference, RolloutState


class CheckpointKind(StrEnum):
    """What a save is part of."""

    TRAINER_CHECKPOINT = "trainer_checkpoint"
    """The trainer saves its weights in the same directory: no claim may be open."""
    ROLLOUT_SNAPSHOT = "rollout_snapshot"
    """Between trainer checkpoints: claims are rolled back, for a resume starts from the anchor."""


class RolloutCheckpointOutcome(StrEnum):
    """How an attempt to save ended, coarsely."""

    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"


class RolloutCheckpointAttemptReason(StrEnum):
    """How an attempt to save ended, and why."""

    COMPLETED = "completed"
    INVARIANT_ERROR = "invariant_error"
    """The state contradicts itself or the rows: the run must stop, for a resume would be wrong."""
    IO_ERROR = "io_error"
    MISSING_TRAINER_ANCHOR = "missing_trainer_anchor"
    """There is no trainer checkpoint of exactly this step to resume from."""
    NO_DATA_PLANE_MUTATIONS = "no_data_plane_mutations"
    OPTIMIZER_COMMIT_IN_PROGRESS = "optimizer_commit_in_progress"
    TIMEOUT = "timeout"
    TRAINER_STATE_CHANGED = "trainer_state_changed"
    """A training step was committed between the decision to save and the cut."""

    @property
    def outcome(self) -> RolloutCheckpointOutcome:
        """Completed, failed or skipped."""
        match self:
            case RolloutCheckpointAttemptReason.COMPLETED:
                return RolloutCheckpointOutcome.COMPLETED
            case (
                RolloutCheckpointAttemptReason.INVARIANT_ERROR
                | RolloutCheckpointAttemptReason.IO_ERROR
                | RolloutCheckpointAttemptReason.TIMEOUT
            ):
                return RolloutCheckpointOutcome.FAILED
            case (
                RolloutCheckpointAttemptReason.MISSING_TRAINER_ANCHOR
                | RolloutCheckpointAttemptReason.NO_DATA_PLANE_MUTATIONS
                | RolloutCheckpointAttemptReason.OPTIMIZER_COMMIT_IN_PROGRESS
                | RolloutCheckpointAttemptReason.TRAINER_STATE_CHANGED
            ):
                return RolloutCheckpointOutcome.SKIPPED
            case _:
                assert_never(self)


class RolloutCheckpointSaveResult(Struct, frozen=True, kw_only=True):
    """What one attempt to save did."""

    saved: bool
    reason: RolloutCheckpointAttemptReason


class TQReplayGroupState(Struct, frozen=True, kw_only=True):
    """One ready group, as the data plane's metadata describes it."""

    group_id: str
    sample_ids: tuple[str, ...]
    start_weight_version: int
    end_weight_version: int
    target_step: int | None
    lengths: tuple[int, ...]
    fields: tuple[str, ...]
    """Names of the tensors of each row, sorted."""
    tags: tuple[tuple[str, str], ...] = ()
    """Sorted by name."""


class TQReplayMetadataState(Struct, frozen=True, kw_only=True):
    """The replay index beside the saved rows of a data plane."""

    schema_version: int
    storage_kind: str
    partition_id: str
    saved_capacity: int | None
    manifest_digest: str
    """SHA-256 over the canonical bytes of `groups`, hexadecimal."""
    groups: tuple[TQReplayGroupState, ...]
    """Sorted by commit order."""


class DataPlaneCheckpointMetadata(Struct, frozen=True, kw_only=True):
    """What a data plane's saved part belongs to, so that parts of two saves are not mixed."""

    schema_version: int
    train_steps: int
    trainer_version: int
    current_epoch: int
    partition_id: str
    sampler_name: str
    mode: CheckpointKind
    replay_digest: str
    replay_group_count: int
    ledger_schema_version: int
    ledger_digest: str
    ledger_group_count: int
    """This and `replay_group_count` are of the whole state; the digests are of what the save has
    written down of it (see `CapturedRolloutState`)."""


class CapturedRolloutState(Struct, frozen=True, kw_only=True):
    """The state of one exclusive cut, ready to be written."""

    dataloader_state: DataloaderState
    sampler_dispatch_index: int
    next_nemo_gym_task_index: int
    replacement_reserve: Queue[PromptReference]
    replay_metadata: TQReplayMetadataState | None = None
    """Of the ready groups that this save writes down: all, or those that changed since the save
    that it adds to."""
    rollout_recovery_payload: bytes | None = None
    """Encoded recovery ledger of the unfinished groups that this save writes down."""
    rollout_recovery_group_count: int | None = None
    replay_row_count: int
    staging_row_count: int
    rolled_back_train_group_count: int
    mutation_version: int
    tq_save_seconds: float
    state: RolloutState
    """Beyond NeMo-RL's: the whole state, of which the fields above are views."""


class ResumeSource(Struct, frozen=True, kw_only=True):
    """What a run resumes from. The defaults describe a fresh run."""

    path: str | None = None
    from_rollout_snapshot: bool = False
    data_plane_metadata: DataPlaneCheckpointMetadata | None = None
    rollout_checkpoint_load_metrics: tuple[tuple[str, float], ...] | None = None
    """Sorted by name."""


class RolloutTraceKind(StrEnum):
    """A point that saving and restoring pass."""

    SAVE_STARTED = "save_started"
    ENVIRONMENT_PAUSED = "environment_paused"
    CUT_TAKEN = "cut_taken"
    CUT_LEFT = "cut_left"
    PUBLISHED = "published"
    PRUNED = "pruned"
    ENVIRONMENT_RESUMED = "environment_resumed"
    SAVE_ENDED = "save_ended"
    RESUME_CHOSEN = "resume_chosen"
    CANDIDATE_REFUSED = "candidate_refused"
    VALIDATED = "validated"
    ROWS_LOADED = "rows_loaded"
    GROUP_PLANNED = "group_planned"
    RESTORED = "restored"


class RolloutTraceEvent(Struct, frozen=True, kw_only=True):
    """One point, with what it is about."""

    kind: RolloutTraceKind
    subject: str
    """A path, a group id, a reason."""
    detail: str = ""
    elapsed_s: float = 0.0
    """Seconds since the attempt began."""


class RolloutTrace(Struct, frozen=True, kw_only=True):
    """What saving and restoring did, event by event."""

    events: tuple[RolloutTraceEvent, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """One line an event, for people."""
        return tuple(
            f"{event.elapsed_s:9.3f} s  {event.kind:<20} {event.subject}"
            + (f": {event.detail}" if event.detail else "")
            for event in self.events
        )
