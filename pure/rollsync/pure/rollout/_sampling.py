"""Decisions that several samplers share. See `sampler` for the policies themselves.

The rule that keeps a gated policy from waiting for ever: the groups that are admitted and untrained
are exactly the batches from the next unclaimed step to the cursor, each less its shortfall
(`unaccounted_groups` is the difference). Admitting, claiming, dropping and replacing all keep it.
"""

from __future__ import annotations

from rollsync.pure.rollout._parts import first_unclaimed_step
from rollsync.pure.rollout.decisions import (
    Admission,
    AdmitBatch,
    DrawReserve,
    NothingLeft,
    NothingToAdmit,
    PullPrompts,
    SamplerLimits,
    Selection,
    SkipStep,
    TrainBatch,
    Wait,
    WaitReason,
)
from rollsync.pure.rollout.events import BatchAdmitted, GroupsClaimed, ReserveDrawn
from rollsync.pure.rollout.persistent import values_of
from rollsync.pure.rollout.state import (
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    ReplayGroup,
    RolloutState,
)


def ready_groups(state: RolloutState) -> list[ReplayGroup]:
    """Ready groups that no step claims, in commit order. O(n log n)."""
    claimed = frozenset(() if state.open_step is None else state.open_step.group_ids)
    groups = (group for group in values_of(state.replay) if group.group_id not in claimed)
    return sorted(groups, key=lambda group: group.commit_index)


def admitted_groups(state: RolloutState) -> list[PromptGroupRecoveryRecord]:
    """Unfinished groups that the cursor counts, in no order. O(n)."""
    return [
        record
        for record in values_of(state.ledger.groups)
        if record.phase is PromptGroupPhase.ADMITTED
    ]


def reserved_groups(state: RolloutState) -> list[PromptGroupRecoveryRecord]:
    """Groups that wait for admission, in the order of their hand-out. O(n)."""
    records = (
        record
        for record in values_of(state.ledger.groups)
        if record.phase is PromptGroupPhase.RESERVED
    )
    return sorted(records, key=lambda record: (record.prompt.epoch, record.prompt.position))


def more_to_come(state: RolloutState, limits: SamplerLimits) -> bool:
    """Whether any group can still become ready."""
    spares = not state.runtime.replacement_reserve.is_empty()
    return limits.prompts_left or spares or len(state.ledger.groups) > 0


def admit_batch(state: RolloutState, limits: SamplerLimits, *, counts_batches: bool) -> Admission:
    """Admit the oldest reserved groups as one batch, or say what is missing for that.

    Args:
        counts_batches: Whether every step trains one dispatch batch, so that a batch which the end
            of the data leaves small must be noted as short.
    """
    batch = limits.num_prompts_per_step
    reserved = reserved_groups(state)
    untrained = len(state.ledger.groups) - len(reserved) + len(state.replay)
    if limits.buffer_capacity is not None and untrained + batch > limits.buffer_capacity:
        return Wait(reason=WaitReason.CAPACITY)
    missing = max(0, batch - len(reserved))
    if missing and limits.prompts_left:
        return PullPrompts(count=missing)
    spares = len(state.runtime.replacement_reserve)
    if missing and spares:
        return DrawReserve(
            event=ReserveDrawn(
                count=min(missing, spares),
                granularity=limits.granularity,
                expected_generations=limits.num_generations_per_prompt,
            )
        )
    if not reserved:
        return NothingToAdmit()
    index = state.sampler_dispatch_index + 1
    return AdmitBatch(
        event=BatchAdmitted(
            group_ids=tuple(record.group_id for record in reserved[:batch]),
            dispatch_index=index,
            target_step=index if state.runtime.sampler_stamps_target_steps else None,
            start_weight_version=limits.served_weight_version,
            shortfall=missing if counts_batches else 0,
        )
    )


def admit_gated(state: RolloutState, limits: SamplerLimits, *, lookahead: int) -> Admission:
    """`admit_batch`, while generation is fewer than `lookahead` batches ahead of the trainer."""
    if state.sampler_dispatch_index >= state.progress.trainer_version + lookahead:
        return Wait(reason=WaitReason.LOOKAHEAD)
    return admit_batch(state, limits, counts_batches=True)


def batch_need(state: RolloutState, limits: SamplerLimits) -> int:
    """Groups that the next training step takes under a gated policy."""
    lacking = state.runtime.batch_shortfall.get(state.progress.trainer_version, 0)
    return max(0, limits.num_prompts_per_step - lacking)


def before_selection(state: RolloutState, limits: SamplerLimits) -> Selection | None:
    """The answer of a gated policy when it does not depend on which groups are ready."""
    if state.open_step is not None:
        return Wait(reason=WaitReason.STEP_OPEN)
    if state.sampler_dispatch_index < state.progress.trainer_version:
        if more_to_come(state, limits):
            return Wait(reason=WaitReason.NOT_ADMITTED)
        return NothingLeft()
    if batch_need(state, limits) == 0:
        return SkipStep(event=claim(state, []))
    return None


def claim(state: RolloutState, groups: list[ReplayGroup]) -> GroupsClaimed:
    """The event with which the next training step takes `groups`."""
    return GroupsClaimed(
        step=state.progress.train_steps + 1,
        group_ids=tuple(group.group_id for group in groups),
    )


def take(state: RolloutState, groups: list[ReplayGroup], need: int) -> Selection:
    """The first `need` groups, or wait for the rest of them."""
    if len(groups) < need:
        return Wait(reason=WaitReason.UNFINISHED)
    return TrainBatch(event=claim(state, groups[:need]))


def oldest_version(state: RolloutState, window: int) -> int:
    """The oldest weight version within `window` versions of the trainer's."""
    return max(0, state.progress.trainer_version - window)


def serves_stale_weights(state: RolloutState, limits: SamplerLimits, window: int) -> bool:
    """Whether a group that starts now would be too old at once. So it is between the commit of a
    step and the sync of its weights, if the window is narrow."""
    return limits.served_weight_version < oldest_version(state, window)


def stale_ready(state: RolloutState, window: int) -> tuple[str, ...]:
    """Ready groups whose weight version has left the window, in commit order."""
    oldest = oldest_version(state, window)
    return tuple(
        group.group_id for group in ready_groups(state) if group.start_weight_version < oldest
    )


def first_step_with_room(state: RolloutState, limits: SamplerLimits) -> int | None:
    """The first admitted, unclaimed batch that can lack one group more.

    Batches of an unstamped policy have no groups of their own: whichever step comes first can do
    with one less. By the module's rule there is such a batch whenever there is a group to drop.
    """
    shortfall = state.runtime.batch_shortfall
    for step in range(first_unclaimed_step(state), state.sampler_dispatch_index + 1):
        if shortfall.get(step, 0) < limits.num_prompts_per_step:
            return step
    return None


def unaccounted_groups(state: RolloutState, *, num_prompts_per_step: int) -> int:
    """Admitted, untrained and unclaimed groups, less those that the batches count. See the module.

    Zero in every reachable state of a gated policy. Negative: the trainer would wait for groups
    that nobody delivers. Positive: groups that no step would train.
    """
    found = len(admitted_groups(state)) + len(ready_groups(state))
    steps = range(first_unclaimed_step(state), state.sampler_dispatch_index + 1)
    shortfall = state.runtime.batch_shortfall
    return found - sum(num_prompts_per_step - shortfall.get(step, 0) for step in steps)
