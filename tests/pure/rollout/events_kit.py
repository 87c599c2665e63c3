"""Short ways to write events and to walk a state through them, for the tests of this room."""

from __future__ import annotations

from returns.pipeline import is_successful
from returns.result import Result

from rollsync.pure.rollout.errors import TransitionError
from rollsync.pure.rollout.events import (
    AttemptDispatched,
    BatchAdmitted,
    BatchReserved,
    FinalizationStarted,
    GroupCommitted,
    GroupDropped,
    GroupsClaimed,
    OptimizerCommitOpened,
    ReserveFilled,
    RolloutEvent,
    SiblingSealed,
    StepCommitted,
)
from rollsync.pure.rollout.state import (
    DataloaderState,
    DropReason,
    PromptReference,
    RecoveryGranularity,
    RolloutState,
    fresh_state,
    sample_id_of,
    staged_key,
)
from rollsync.pure.rollout.transitions import apply


def fresh(*, stamped: bool = False) -> RolloutState:
    return fresh_state(dataset_digest="d0", seed=7, sampler_stamps_target_steps=stamped)


def prompt(position: int, epoch: int = 0) -> PromptReference:
    return PromptReference(
        prompt_id=f"e{epoch}p{position}",
        sample_id=f"s{position}",
        task="sum",
        epoch=epoch,
        position=position,
        content_digest=f"c{position}",
    )


def at(position: int, epoch: int = 0) -> DataloaderState:
    return DataloaderState(epoch=epoch, position=position, dataset_digest="d0", seed=7)


def reserve(*positions: int, siblings: int = 2) -> BatchReserved:
    return BatchReserved(
        prompts=tuple(prompt(position) for position in positions),
        dataloader_after=at(positions[-1] + 1),
        granularity=RecoveryGranularity.SIBLING,
        expected_generations=siblings,
    )


def spare(*positions: int) -> ReserveFilled:
    return ReserveFilled(
        prompts=tuple(prompt(position) for position in positions),
        dataloader_after=at(positions[-1] + 1),
    )


def admit(
    state: RolloutState, *positions: int, shortfall: int = 0, version: int | None = None
) -> BatchAdmitted:
    index = state.sampler_dispatch_index + 1
    return BatchAdmitted(
        group_ids=tuple(f"e0p{position}" for position in positions),
        dispatch_index=index,
        target_step=index if state.runtime.sampler_stamps_target_steps else None,
        start_weight_version=state.progress.trainer_version if version is None else version,
        shortfall=shortfall,
    )


def dispatch(group_id: str, sibling: int, attempt: int = 0) -> AttemptDispatched:
    return AttemptDispatched(group_id=group_id, sibling_index=sibling, attempt_index=attempt)


def seal(group_id: str, sibling: int, attempt: int = 0, reward: float = 1.0) -> SiblingSealed:
    return SiblingSealed(
        group_id=group_id,
        sibling_index=sibling,
        attempt_index=attempt,
        receipt=f"r-{group_id}-{sibling}-{attempt}",
        reward=reward,
        masked=False,
        staged_keys=(staged_key(group_id, sibling, attempt),),
    )


def commit(state: RolloutState, group_id: str, siblings: int = 2) -> GroupCommitted:
    return GroupCommitted(
        group_id=group_id,
        sample_ids=tuple(sample_id_of(group_id, index) for index in range(siblings)),
        end_weight_version=state.progress.trainer_version,
        lengths=(5,) * siblings,
    )


def drop(
    group_id: str, shortfall_step: int | None, reason: DropReason = DropReason.UNRECOVERABLE
) -> GroupDropped:
    return GroupDropped(
        group_id=group_id, reason=reason, start_weight_version=0, shortfall_step=shortfall_step
    )


def generate(group_id: str, siblings: int = 2) -> tuple[RolloutEvent, ...]:
    """Dispatch and seal every sibling, first attempts."""
    return tuple(
        event
        for index in range(siblings)
        for event in (dispatch(group_id, index), seal(group_id, index))
    )


def train(state: RolloutState, *group_ids: str) -> tuple[RolloutEvent, ...]:
    step = state.progress.train_steps + 1
    return (
        GroupsClaimed(step=step, group_ids=group_ids),
        OptimizerCommitOpened(step=step),
        StepCommitted(step=step, trainer_version=state.progress.trainer_version + 1),
    )


def value_of(result: Result[RolloutState, TransitionError]) -> RolloutState:
    assert is_successful(result), result.failure()
    return result.unwrap()


def after(state: RolloutState, *events: RolloutEvent) -> RolloutState:
    for event in events:
        state = value_of(apply(state, event))
    return state


def refusal(state: RolloutState, event: RolloutEvent) -> TransitionError:
    result = apply(state, event)
    assert not is_successful(result), f"{event} was accepted"
    return result.failure()


def made_ready(state: RolloutState, *group_ids: str) -> RolloutState:
    """Admitted groups, generated and committed to the replay index."""
    for group_id in group_ids:
        state = after(state, *generate(group_id), FinalizationStarted(group_id=group_id))
        state = after(state, commit(state, group_id))
    return state


def admitted(*positions: int, stamped: bool = False, siblings: int = 2) -> RolloutState:
    """A fresh run with one batch admitted."""
    state = after(fresh(stamped=stamped), reserve(*positions, siblings=siblings))
    return after(state, admit(state, *positions))
