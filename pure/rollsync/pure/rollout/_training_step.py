"""Transitions of the training step: claim, release, optimizer-commit window, commit.

Rule: claimed groups stay in the replay index until the step commits, so rolling a claim back (by a
snapshot, or after a crash) needs nothing but forgetting the open step. What becomes trained, the
rows to clear, the counters and the window's end are one event.
"""

from __future__ import annotations

from msgspec.structs import replace

from rollsync.pure.rollout._parts import ready, with_rows_to_clear
from rollsync.pure.rollout.errors import (
    OptimizerCommitWindow,
    RepeatedIds,
    StepAlreadyOpen,
    StepMismatch,
    TransitionError,
    WrongTargetStep,
    WrongWeightVersion,
)
from rollsync.pure.rollout.events import (
    ClaimsReleased,
    GroupsClaimed,
    OptimizerCommitOpened,
    StepCommitted,
)
from rollsync.pure.rollout.state import OpenTrainingStep, ReplayGroup, RolloutState, Trained


def claimed(state: RolloutState, event: GroupsClaimed) -> RolloutState | TransitionError:
    """A training step opens and takes groups; none, if its whole batch was dropped."""
    if state.open_step is not None:
        return StepAlreadyOpen(step=state.open_step.step)
    if event.step != state.progress.train_steps + 1:
        return StepMismatch(step=event.step, needed=state.progress.train_steps + 1)
    if len(set(event.group_ids)) != len(event.group_ids):
        return RepeatedIds(ids=event.group_ids)
    for group_id in event.group_ids:
        group = ready(state, group_id)
        if not isinstance(group, ReplayGroup):
            return group
        if group.target_step not in (None, state.progress.trainer_version):
            return WrongTargetStep(
                group_id=group_id,
                target_step=group.target_step,
                needed=state.progress.trainer_version,
            )
    return replace(state, open_step=OpenTrainingStep(step=event.step, group_ids=event.group_ids))


def released(state: RolloutState, event: ClaimsReleased) -> RolloutState | TransitionError:
    """The step is given up before the optimizer changed anything."""
    step = _open_step(state, event.step, window_is_open=False)
    if not isinstance(step, OpenTrainingStep):
        return step
    return replace(state, open_step=None)


def commit_opened(
    state: RolloutState, event: OptimizerCommitOpened
) -> RolloutState | TransitionError:
    """From here to the commit, weights and counters disagree: nothing may be saved."""
    step = _open_step(state, event.step, window_is_open=False)
    if not isinstance(step, OpenTrainingStep):
        return step
    return replace(state, open_step=replace(step, optimizer_commit_open=True))


def committed(state: RolloutState, event: StepCommitted) -> RolloutState | TransitionError:
    """The claimed groups are trained, and the counters say so."""
    step = _open_step(state, event.step, window_is_open=True)
    if not isinstance(step, OpenTrainingStep):
        return step
    trained_on = state.progress.trainer_version
    if event.trainer_version != trained_on + 1:
        return WrongWeightVersion(
            what="trainer",
            weight_version=event.trainer_version,
            at_least=trained_on + 1,
            at_most=trained_on + 1,
        )
    outcomes, replay = state.outcomes, state.replay
    metrics = state.runtime.finalizer_metrics_by_group
    rewards = state.runtime.finalizer_rewards_by_group
    freed: list[str] = []
    for group_id in step.group_ids:
        group = replay[group_id]
        outcomes = outcomes.insert(group.prompt.prompt_id, Trained(step=step.step))
        replay = replay.remove(group_id)
        metrics, rewards = metrics.discard(group_id), rewards.discard(group_id)
        freed.extend(group.sample_ids)
    after = replace(
        state,
        progress=replace(
            state.progress, train_steps=step.step, trainer_version=event.trainer_version
        ),
        runtime=replace(
            state.runtime,
            batch_shortfall=state.runtime.batch_shortfall.discard(trained_on),
            finalizer_metrics_by_group=metrics,
            finalizer_rewards_by_group=rewards,
        ),
        replay=replay,
        outcomes=outcomes,
        open_step=None,
    )
    return with_rows_to_clear(after, freed)


def _open_step(
    state: RolloutState, step: int, *, window_is_open: bool
) -> OpenTrainingStep | StepMismatch | OptimizerCommitWindow:
    found = state.open_step
    if found is None or found.step != step:
        return StepMismatch(step=step, needed=None if found is None else found.step)
    if found.optimizer_commit_open is not window_is_open:
        return OptimizerCommitWindow(step=step, window_is_open=found.optimizer_commit_open)
    return found
