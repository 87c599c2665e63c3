"""Transitions between the dataloader, the replacement reserve and the ledger.

Rule: a prompt leaves the dataloader in the same event that records it, and the dataloader's
position only goes forward without a gap. So no crash can lose a prompt or hand it out twice.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace
from rpds import Queue

from rollsync.pure.rollout._parts import (
    first_unclaimed_step,
    new_group,
    unfinished,
    with_groups,
    with_shortfall,
    without_record,
)
from rollsync.pure.rollout.errors import (
    CursorJump,
    DatasetChanged,
    HandOutGap,
    IllegalPromptId,
    PromptHandedOutTwice,
    RepeatedIds,
    ShortfallRefused,
    TaskIndexBackwards,
    TransitionError,
    UnknownGroup,
    WrongCount,
    WrongPhase,
    WrongTargetStep,
    WrongWeightVersion,
)
from rollsync.pure.rollout.events import (
    BatchAdmitted,
    BatchReserved,
    GroupReturnedToReserve,
    NemoGymTaskIndexAdvanced,
    ReserveDrawn,
    ReserveFilled,
)
from rollsync.pure.rollout.state import (
    DataloaderState,
    PromptGroupPhase,
    PromptReference,
    RolloutState,
    admission_id_of,
)


def batch_reserved(state: RolloutState, event: BatchReserved) -> RolloutState | TransitionError:
    """Prompts from the dataloader become reserved groups."""
    if event.expected_generations < 1:
        return WrongCount(what="expected generations", count=event.expected_generations, needed=1)
    handed_out = _handed_out(state, event.prompts, event.dataloader_after)
    if not isinstance(handed_out, RolloutState):
        return handed_out
    groups = handed_out.ledger.groups
    for prompt in event.prompts:
        record = new_group(
            prompt,
            granularity=event.granularity,
            expected_generations=event.expected_generations,
        )
        groups = groups.insert(record.group_id, record)
    return with_groups(handed_out, groups)


def reserve_filled(state: RolloutState, event: ReserveFilled) -> RolloutState | TransitionError:
    """Prompts from the dataloader become spares."""
    handed_out = _handed_out(state, event.prompts, event.dataloader_after)
    if not isinstance(handed_out, RolloutState):
        return handed_out
    reserve = handed_out.runtime.replacement_reserve
    for prompt in event.prompts:
        reserve = reserve.enqueue(prompt)
    return _with_reserve(handed_out, reserve)


def reserve_drawn(state: RolloutState, event: ReserveDrawn) -> RolloutState | TransitionError:
    """The oldest spares become reserved groups."""
    reserve = state.runtime.replacement_reserve
    if event.expected_generations < 1:
        return WrongCount(what="expected generations", count=event.expected_generations, needed=1)
    if not 1 <= event.count <= len(reserve):
        return WrongCount(what="prompts drawn", count=event.count, needed=len(reserve))
    groups = state.ledger.groups
    for _ in range(event.count):
        record = new_group(
            reserve.peek(),
            granularity=event.granularity,
            expected_generations=event.expected_generations,
        )
        groups = groups.insert(record.group_id, record)
        reserve = reserve.dequeue()
    return _with_reserve(with_groups(state, groups), reserve)


def batch_admitted(state: RolloutState, event: BatchAdmitted) -> RolloutState | TransitionError:
    """The cursor advances and the batch's groups are admitted, together."""
    refused = _admission_refused(state, event)
    if refused is not None:
        return refused
    groups = state.ledger.groups
    for group_id in event.group_ids:
        record = unfinished(state, group_id)
        if isinstance(record, UnknownGroup):
            return record
        if record.phase is not PromptGroupPhase.RESERVED:
            return WrongPhase(
                group_id=group_id, phase=record.phase, needed=PromptGroupPhase.RESERVED
            )
        admitted = replace(
            record,
            admission_id=admission_id_of(event.dispatch_index),
            phase=PromptGroupPhase.ADMITTED,
            target_step=event.target_step,
            start_weight_version=event.start_weight_version,
        )
        groups = groups.insert(group_id, admitted)
    moved = replace(with_groups(state, groups), sampler_dispatch_index=event.dispatch_index)
    return with_shortfall(moved, event.dispatch_index, event.shortfall)


def returned_to_reserve(
    state: RolloutState, event: GroupReturnedToReserve
) -> RolloutState | TransitionError:
    """A reserved group's prompt becomes a spare again; nothing of it was generated yet."""
    record = unfinished(state, event.group_id)
    if isinstance(record, UnknownGroup):
        return record
    if record.phase is not PromptGroupPhase.RESERVED:
        return WrongPhase(
            group_id=event.group_id, phase=record.phase, needed=PromptGroupPhase.RESERVED
        )
    reserve = state.runtime.replacement_reserve.enqueue(record.prompt)
    return _with_reserve(without_record(state, event.group_id), reserve)


def task_index_advanced(
    state: RolloutState, event: NemoGymTaskIndexAdvanced
) -> RolloutState | TransitionError:
    """The environment backend's counter is noted, so that a resume goes on after it."""
    if event.next_index < state.next_nemo_gym_task_index:
        return TaskIndexBackwards(
            next_index=event.next_index, at_least=state.next_nemo_gym_task_index
        )
    return replace(state, next_nemo_gym_task_index=event.next_index)


def _with_reserve(state: RolloutState, reserve: Queue[PromptReference]) -> RolloutState:
    return replace(state, runtime=replace(state.runtime, replacement_reserve=reserve))


def _admission_refused(state: RolloutState, event: BatchAdmitted) -> TransitionError | None:
    if not event.group_ids:
        return WrongCount(what="groups admitted", count=0, needed=1)
    repeated = _repeated(event.group_ids)
    if repeated:
        return RepeatedIds(ids=repeated)
    if event.dispatch_index != state.sampler_dispatch_index + 1:
        return CursorJump(
            dispatch_index=event.dispatch_index, needed=state.sampler_dispatch_index + 1
        )
    stamp = event.dispatch_index if state.runtime.sampler_stamps_target_steps else None
    if event.target_step != stamp:
        return WrongTargetStep(group_id=None, target_step=event.target_step, needed=stamp)
    if stamp is not None and stamp < first_unclaimed_step(state):
        # Its step has passed: nothing would ever train these groups.
        return WrongTargetStep(group_id=None, target_step=stamp, needed=first_unclaimed_step(state))
    if not 0 <= event.start_weight_version <= state.progress.trainer_version:
        return WrongWeightVersion(
            what="start",
            weight_version=event.start_weight_version,
            at_least=0,
            at_most=state.progress.trainer_version,
        )
    if event.shortfall < 0:
        return WrongCount(what="shortfall", count=event.shortfall, needed=0)
    if event.shortfall > 0 and event.dispatch_index < first_unclaimed_step(state):
        return ShortfallRefused(
            group_id=event.group_ids[0],
            shortfall_step=event.dispatch_index,
            first=first_unclaimed_step(state),
            last=event.dispatch_index,
        )
    return None


def _handed_out(
    state: RolloutState, prompts: tuple[PromptReference, ...], after: DataloaderState
) -> RolloutState | TransitionError:
    """The state with the dataloader moved to `after`, if `prompts` are what lies between."""
    refused = _hand_out_refused(state, prompts, after)
    if refused is not None:
        return refused
    return replace(
        state,
        dataloader_state=after,
        progress=replace(state.progress, current_epoch=after.epoch),
    )


def _hand_out_refused(
    state: RolloutState, prompts: tuple[PromptReference, ...], after: DataloaderState
) -> TransitionError | None:
    before = state.dataloader_state
    if not prompts:
        return WrongCount(what="prompts handed out", count=0, needed=1)
    for what, expected, found in (
        ("dataset", before.dataset_digest, after.dataset_digest),
        ("seed", str(before.seed), str(after.seed)),
    ):
        if expected != found:
            return DatasetChanged(what=what, expected=expected, found=found)
    repeated = _repeated(tuple(prompt.prompt_id for prompt in prompts))
    if repeated:
        return RepeatedIds(ids=repeated)
    epoch, position = before.epoch, before.position
    for prompt in prompts:
        prompt_id = prompt.prompt_id
        if not prompt_id or "/" in prompt_id:
            return IllegalPromptId(prompt_id=prompt_id)
        if prompt_id in state.ledger.groups or prompt_id in state.replay:
            return PromptHandedOutTwice(prompt_id=prompt_id)
        if prompt_id in state.outcomes:
            return PromptHandedOutTwice(prompt_id=prompt_id)
        gap = _gap(epoch, position, prompt.epoch, prompt.position)
        if gap is not None:
            return gap
        epoch, position = prompt.epoch, prompt.position + 1
    return _gap(epoch, position, after.epoch, after.position)


def _gap(
    expected_epoch: int, expected_position: int, epoch: int, position: int
) -> HandOutGap | None:
    """None if `epoch` goes on at the expected position, or the next epoch begins."""
    if (epoch, position) in ((expected_epoch, expected_position), (expected_epoch + 1, 0)):
        return None
    return HandOutGap(
        expected_epoch=expected_epoch,
        expected_position=expected_position,
        epoch=epoch,
        position=position,
    )


def _repeated(ids: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(name for name, count in Counter(ids).items() if count > 1))
