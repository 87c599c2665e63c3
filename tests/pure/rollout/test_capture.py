"""What a save keeps, and when it must not be made."""

from __future__ import annotations

from returns.pipeline import is_successful

from rollsync.pure.rollout.capture import (
    Capture,
    CaptureRefused,
    ClaimsOpen,
    FinalizationUnsettled,
    OptimizerCommitOpen,
    capture,
    describe_refusal,
)
from rollsync.pure.rollout.checkpointing import (
    CheckpointKind,
    RolloutCheckpointAttemptReason,
    RolloutCheckpointOutcome,
)
from rollsync.pure.rollout.events import (
    FinalizationFailed,
    FinalizationStarted,
    GroupsClaimed,
    OptimizerCommitOpened,
)
from rollsync.pure.rollout.state import RolloutState, sample_id_of, staged_key
from tests.pure.rollout.events_kit import admitted, after, dispatch, generate, made_ready, seal

SNAPSHOT = CheckpointKind.ROLLOUT_SNAPSHOT
TRAINER = CheckpointKind.TRAINER_CHECKPOINT


def captured(state: RolloutState, kind: CheckpointKind = SNAPSHOT) -> Capture:
    return capture(state, kind).unwrap()


def refused(state: RolloutState, kind: CheckpointKind = SNAPSHOT) -> CaptureRefused:
    result = capture(state, kind)
    assert not is_successful(result)
    return result.failure()


def test_a_snapshot_rolls_claims_back_and_counts_them() -> None:
    before = made_ready(admitted(0, 1), "e0p0", "e0p1")
    claimed = after(before, GroupsClaimed(step=1, group_ids=("e0p0",)))
    assert captured(claimed).state == before
    assert captured(claimed).rolled_back_train_group_count == 1
    assert captured(before).rolled_back_train_group_count == 0


def test_a_trainer_checkpoint_with_open_claims_is_an_error() -> None:
    state = made_ready(admitted(0), "e0p0")
    assert captured(state, TRAINER).state == state
    claimed = after(state, GroupsClaimed(step=1, group_ids=("e0p0",)))
    assert refused(claimed, TRAINER) == ClaimsOpen(step=1, group_ids=("e0p0",))
    assert "after its commit" in describe_refusal(refused(claimed, TRAINER))


def test_nothing_is_saved_inside_the_optimizer_commit_window() -> None:
    state = made_ready(admitted(0), "e0p0")
    state = after(state, GroupsClaimed(step=1, group_ids=("e0p0",)), OptimizerCommitOpened(step=1))
    for kind in CheckpointKind:
        assert refused(state, kind) == OptimizerCommitOpen(step=1)


def test_nothing_is_saved_while_a_finalization_is_not_settled() -> None:
    state = after(admitted(0), *generate("e0p0"), FinalizationStarted(group_id="e0p0"))
    assert refused(state) == FinalizationUnsettled(group_ids=("e0p0",))
    unknown = after(state, FinalizationFailed(group_id="e0p0", outcome_known=False))
    assert refused(unknown) == FinalizationUnsettled(group_ids=("e0p0",))
    assert "e0p0" in describe_refusal(refused(unknown))


def test_the_rows_to_save_are_those_that_groups_own() -> None:
    state = made_ready(admitted(0, 1), "e0p0")
    state = after(state, dispatch("e0p1", 0), seal("e0p1", 0))
    assert captured(state).replay_rows == (sample_id_of("e0p0", 0), sample_id_of("e0p0", 1))
    assert captured(state).staging_rows == (staged_key("e0p1", 0, 0),)


def test_every_reason_has_an_outcome() -> None:
    outcomes = {reason: reason.outcome for reason in RolloutCheckpointAttemptReason}
    failed = {key for key, value in outcomes.items() if value is RolloutCheckpointOutcome.FAILED}
    assert failed == {
        RolloutCheckpointAttemptReason.INVARIANT_ERROR,
        RolloutCheckpointAttemptReason.IO_ERROR,
        RolloutCheckpointAttemptReason.TIMEOUT,
    }
    completed = RolloutCheckpointAttemptReason.COMPLETED
    assert outcomes[completed] is RolloutCheckpointOutcome.COMPLETED
    assert sum(each is RolloutCheckpointOutcome.SKIPPED for each in outcomes.values()) == 4
