"""`rollout.state`: everything that the run has in flight, as one value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct
from returns.result import Failure, Result, Success
from rpds import HashTrieMap, HashTrieSet, Queue

from rollsync.codecs.canonical import strictly_increasing
from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.rollout.persistent import sorted_items, sorted_members, sorted_values
from rollsync.codecs.rollout.recovery_ledger import ledger_groups
from rollsync.codecs.rollout.state import v1
from rollsync.pure.rollout.state import (
    DataloaderState,
    Dropped,
    DropReason,
    FinalizedReward,
    OpenTrainingStep,
    PromptGroupRecoveryRecord,
    PromptOutcome,
    PromptReference,
    ReplayGroup,
    RolloutRecoveryLedger,
    RolloutRuntimeState,
    RolloutState,
    Trained,
    TrainingProgress,
)


class _WrittenRuntime(Struct, frozen=True, kw_only=True):
    replacement_reserve: list[PromptReference]
    batch_shortfall: list[tuple[int, int]]
    sampler_stamps_target_steps: bool
    finalizer_metrics_by_group: list[tuple[str, dict[str, float]]]
    finalizer_rewards_by_group: list[tuple[str, tuple[FinalizedReward, ...]]]


class _WrittenState(Struct, frozen=True, kw_only=True):
    """The newest wire struct, with the domain's records written as they are."""

    progress: TrainingProgress
    dataloader_state: DataloaderState
    sampler_dispatch_index: int
    next_nemo_gym_task_index: int
    runtime: _WrittenRuntime
    ledger: list[PromptGroupRecoveryRecord]
    replay: list[ReplayGroup]
    next_commit_index: int
    open_step: OpenTrainingStep | None
    rows_to_clear: list[str]
    outcomes: list[tuple[str, PromptOutcome]]


def to_wire(state: RolloutState) -> _WrittenState:
    """The state with its maps and sets as sorted arrays."""
    runtime = state.runtime
    return _WrittenState(
        progress=state.progress,
        dataloader_state=state.dataloader_state,
        sampler_dispatch_index=state.sampler_dispatch_index,
        next_nemo_gym_task_index=state.next_nemo_gym_task_index,
        runtime=_WrittenRuntime(
            replacement_reserve=list(runtime.replacement_reserve),
            batch_shortfall=sorted_items(runtime.batch_shortfall),
            sampler_stamps_target_steps=runtime.sampler_stamps_target_steps,
            finalizer_metrics_by_group=[
                (group_id, dict(metrics))
                for group_id, metrics in sorted_items(runtime.finalizer_metrics_by_group)
            ],
            finalizer_rewards_by_group=sorted_items(runtime.finalizer_rewards_by_group),
        ),
        ledger=sorted_values(state.ledger.groups),
        replay=sorted_values(state.replay),
        next_commit_index=state.next_commit_index,
        open_step=state.open_step,
        rows_to_clear=sorted_members(state.rows_to_clear),
        outcomes=sorted_items(state.outcomes),
    )


def from_wire(wire: v1.RolloutState) -> Result[RolloutState, Refusal]:
    """The state, provided that each array that stands for a map or a set is sorted by its key."""
    for name, in_order in _orders(wire):
        if not in_order:
            return Failure(f"{name} is sorted by its key, each key once")
    replay = msgspec.convert(wire.replay, tuple[ReplayGroup, ...], from_attributes=True)
    return Success(
        RolloutState(
            progress=msgspec.convert(wire.progress, TrainingProgress, from_attributes=True),
            dataloader_state=msgspec.convert(
                wire.dataloader_state, DataloaderState, from_attributes=True
            ),
            sampler_dispatch_index=wire.sampler_dispatch_index,
            next_nemo_gym_task_index=wire.next_nemo_gym_task_index,
            runtime=_runtime(wire.runtime),
            ledger=RolloutRecoveryLedger(groups=ledger_groups(wire.ledger)),
            replay=HashTrieMap({group.group_id: group for group in replay}),
            next_commit_index=wire.next_commit_index,
            open_step=msgspec.convert(
                wire.open_step, OpenTrainingStep | None, from_attributes=True
            ),
            rows_to_clear=HashTrieSet(wire.rows_to_clear),
            outcomes=HashTrieMap(
                {prompt_id: _outcome(outcome) for prompt_id, outcome in wire.outcomes}
            ),
        )
    )


def _orders(wire: v1.RolloutState) -> Iterator[tuple[str, bool]]:
    runtime = wire.runtime
    yield "batch_shortfall", strictly_increasing([step for step, _ in runtime.batch_shortfall])
    for name, pairs in (
        ("finalizer_metrics_by_group", runtime.finalizer_metrics_by_group),
        ("finalizer_rewards_by_group", runtime.finalizer_rewards_by_group),
        ("outcomes", wire.outcomes),
    ):
        yield name, strictly_increasing([pair[0] for pair in pairs])
    yield "ledger", strictly_increasing([group.group_id for group in wire.ledger])
    yield "replay", strictly_increasing([group.group_id for group in wire.replay])
    yield "rows_to_clear", strictly_increasing(wire.rows_to_clear)


def _runtime(wire: v1.Runtime) -> RolloutRuntimeState:
    return RolloutRuntimeState(
        replacement_reserve=Queue(
            msgspec.convert(
                wire.replacement_reserve, tuple[PromptReference, ...], from_attributes=True
            )
        ),
        batch_shortfall=HashTrieMap(wire.batch_shortfall),
        sampler_stamps_target_steps=wire.sampler_stamps_target_steps,
        finalizer_metrics_by_group=HashTrieMap(
            {
                group_id: HashTrieMap(metrics)
                for group_id, metrics in wire.finalizer_metrics_by_group
            }
        ),
        finalizer_rewards_by_group=HashTrieMap(
            {
                group_id: msgspec.convert(
                    rewards, tuple[FinalizedReward, ...], from_attributes=True
                )
                for group_id, rewards in wire.finalizer_rewards_by_group
            }
        ),
    )


def _outcome(wire: v1.Trained | v1.Dropped) -> PromptOutcome:
    match wire:
        case v1.Trained():
            return Trained(step=wire.step)
        case v1.Dropped():
            return Dropped(step=wire.step, reason=DropReason(wire.reason))


ROLLOUT_STATE: Final = kind(
    "rollout.state",
    domain=RolloutState,
    history=first(v1.RolloutState),
    to_wire=to_wire,
    from_wire=from_wire,
)
