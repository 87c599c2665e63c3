"""What a save keeps of a state, or why it must not be made now.

Rule: what is saved is what a resume can start from. The weights that it starts from are the
anchor's, so claims of the open step are rolled back; and nothing whose outcome is not a fact yet is
written down.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace
from returns.result import Failure, Result, Success

from rollsync.pure.rollout._parts import staged_keys_of
from rollsync.pure.rollout._sampling import ready_groups
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.rollout.persistent import values_of
from rollsync.pure.rollout.state import PromptGroupStatus, RolloutState

_UNSETTLED = (PromptGroupStatus.FINALIZING, PromptGroupStatus.FINALIZATION_UNKNOWN)


class ClaimsOpen(Struct, frozen=True, kw_only=True, tag=True):
    """A trainer checkpoint between claim and commit: weights and claims belong to two steps."""

    step: int
    group_ids: tuple[str, ...]


class OptimizerCommitOpen(Struct, frozen=True, kw_only=True, tag=True):
    """The weights may or may not have changed already: wait for the step's commit."""

    step: int


class FinalizationUnsettled(Struct, frozen=True, kw_only=True, tag=True):
    """Finalizations run, or nobody knows how they ended: whether those rows are published is not a
    fact yet."""

    group_ids: tuple[str, ...]


CaptureRefused = ClaimsOpen | OptimizerCommitOpen | FinalizationUnsettled


class Capture(Struct, frozen=True, kw_only=True):
    """What a save keeps of the state at its cut."""

    state: RolloutState
    """Claims are rolled back in it: claimed groups are ready again."""
    rolled_back_train_group_count: int
    replay_rows: tuple[str, ...]
    """Rows of ready groups, in commit order: these and the staging rows are to be saved."""
    staging_rows: tuple[str, ...]


def capture(state: RolloutState, kind: CheckpointKind) -> Result[Capture, CaptureRefused]:
    """What a save of this kind keeps of `state`. O(n): call it outside the exclusive cut."""
    step = state.open_step
    if step is not None and step.optimizer_commit_open:
        return Failure(OptimizerCommitOpen(step=step.step))
    if step is not None and kind is CheckpointKind.TRAINER_CHECKPOINT:
        return Failure(ClaimsOpen(step=step.step, group_ids=step.group_ids))
    unsettled = tuple(
        sorted(
            record.group_id
            for record in values_of(state.ledger.groups)
            if record.status in _UNSETTLED
        )
    )
    if unsettled:
        return Failure(FinalizationUnsettled(group_ids=unsettled))
    kept = replace(state, open_step=None)
    return Success(
        Capture(
            state=kept,
            rolled_back_train_group_count=0 if step is None else len(step.group_ids),
            replay_rows=tuple(key for group in ready_groups(kept) for key in group.sample_ids),
            staging_rows=tuple(
                sorted(
                    key
                    for record in values_of(kept.ledger.groups)
                    for key in staged_keys_of(record)
                )
            ),
        )
    )


def describe_refusal(refused: CaptureRefused) -> str:
    """The refusal as a sentence."""
    match refused:
        case ClaimsOpen():
            return (
                f"training step {refused.step} holds {len(refused.group_ids)} claims: save the "
                "trainer checkpoint after its commit"
            )
        case OptimizerCommitOpen():
            return f"the optimizer-commit window of training step {refused.step} is open"
        case FinalizationUnsettled():
            return (
                f"{len(refused.group_ids)} finalizations are not settled, the first is that of "
                f"group {refused.group_ids[0]}"
            )
        case _:
            assert_never(refused)
