"""Which groups a policy drops, and what a drop means for the batches that the policy counts.

For any sampler: it says what is too old and which batch would miss the group, and this makes the
event of it. Rule kept here: a group that is being finalized is not dropped, and nothing is dropped
for its age as long as what took its place would be as old.
"""

from __future__ import annotations

from rollsync.pure.rollout._sampling import admitted_groups
from rollsync.pure.rollout.decisions import SamplerLimits
from rollsync.pure.rollout.events import GroupDropped
from rollsync.pure.rollout.sampler import PromptGroupSampler
from rollsync.pure.rollout.state import (
    DropReason,
    PromptGroupPhase,
    PromptGroupStatus,
    RolloutState,
)

_DROPPABLE = (PromptGroupStatus.GENERATING, PromptGroupStatus.READY_TO_FINALIZE)


def drop_group(
    sampler: PromptGroupSampler,
    state: RolloutState,
    group_id: str,
    *,
    reason: DropReason,
    limits: SamplerLimits,
) -> GroupDropped:
    """The event that drops a group, with the shortfall where this policy would miss it."""
    record = state.ledger.groups.get(group_id)
    reserved = record is not None and record.phase is PromptGroupPhase.RESERVED
    return GroupDropped(
        group_id=group_id,
        reason=reason,
        start_weight_version=limits.served_weight_version,
        shortfall_step=None if reserved else sampler.shortfall_step(state, group_id, limits),
    )


def next_stale_drop(
    sampler: PromptGroupSampler, state: RolloutState, limits: SamplerLimits
) -> GroupDropped | None:
    """The next group to drop as stale, ready or unfinished; None when there is none.

    One at a time: a drop changes what the next one means (a spare takes a place, a batch becomes
    short), so apply it and ask again. A group that is being finalized waits until it is ready. And
    while the engines serve weights that are too old themselves, nothing is dropped: what took its
    place would be as old.
    """
    version = state.progress.trainer_version
    if sampler.should_abort_inflight(
        start_weight_version=limits.served_weight_version, current_train_weight=version
    ):
        return None
    stale = sampler.evict(state)
    if stale:
        return drop_group(sampler, state, stale[0], reason=DropReason.STALE, limits=limits)
    too_old = [
        record.group_id
        for record in admitted_groups(state)
        if record.status in _DROPPABLE
        and record.start_weight_version is not None
        and sampler.should_abort_inflight(
            start_weight_version=record.start_weight_version,
            current_train_weight=version,
        )
    ]
    if too_old:
        return drop_group(sampler, state, min(too_old), reason=DropReason.STALE, limits=limits)
    return None
