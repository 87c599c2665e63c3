"""The difference of two states as a value: `patch(a, diff(a, b)) == b`, for all states.

A diff is as large as what changed, whatever the size of the states; it is plain (tuples, sorted),
so it has canonical bytes and can be printed. Finding it walks both states once, O(n), and looks
into a record only if it is another object: states that share structure are compared by identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from msgspec import Struct
from rpds import HashTrieMap, HashTrieSet, Queue

from rollsync.pure.rollout.state import (
    DataloaderState,
    Dropped,
    FinalizedReward,
    OpenTrainingStep,
    PromptGroupRecoveryRecord,
    PromptOutcome,
    PromptReference,
    ReplayGroup,
    RolloutAttemptStatus,
    RolloutRecoveryLedger,
    RolloutRuntimeState,
    RolloutState,
    TrainingProgress,
)

K = TypeVar("K", str, int)
V = TypeVar("V")


class Replaced(Struct, Generic[V], frozen=True, kw_only=True):
    """A field's new value; where a diff has None instead, the field did not change."""

    value: V


class MapDiff(Struct, Generic[K, V], frozen=True, kw_only=True):
    """Entries that are new or have another value, and keys that are gone; sorted by key."""

    put: tuple[tuple[K, V], ...] = ()
    removed: tuple[K, ...] = ()


class SetDiff(Struct, frozen=True, kw_only=True):
    """Members that came and went, sorted."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class ReserveDiff(Struct, frozen=True, kw_only=True):
    """The reserve is a queue: so many prompts left at its front, these came to its end."""

    taken: int = 0
    appended: tuple[PromptReference, ...] = ()


class RolloutStateDiff(Struct, frozen=True, kw_only=True):
    """What differs between two states. The default of every field is: nothing."""

    progress: Replaced[TrainingProgress] | None = None
    dataloader_state: Replaced[DataloaderState] | None = None
    sampler_dispatch_index: Replaced[int] | None = None
    next_nemo_gym_task_index: Replaced[int] | None = None
    next_commit_index: Replaced[int] | None = None
    open_step: Replaced[OpenTrainingStep | None] | None = None
    sampler_stamps_target_steps: Replaced[bool] | None = None
    replacement_reserve: ReserveDiff = ReserveDiff()
    batch_shortfall: MapDiff[int, int] = MapDiff()
    finalizer_metrics: MapDiff[str, tuple[tuple[str, float], ...]] = MapDiff()
    """Group id -> its metrics, sorted by name."""
    finalizer_rewards: MapDiff[str, tuple[FinalizedReward, ...]] = MapDiff()
    ledger: MapDiff[str, PromptGroupRecoveryRecord] = MapDiff()
    replay: MapDiff[str, ReplayGroup] = MapDiff()
    outcomes: MapDiff[str, PromptOutcome] = MapDiff()
    rows_to_clear: SetDiff = SetDiff()

    @property
    def is_empty(self) -> bool:
        """Whether the two states are equal."""
        return self == RolloutStateDiff()


def diff(a: RolloutState, b: RolloutState) -> RolloutStateDiff:
    """What leads from `a` to `b`. O(n) to find, as small as the change to keep."""
    runtime_a, runtime_b = a.runtime, b.runtime
    metrics = _map_diff(runtime_a.finalizer_metrics_by_group, runtime_b.finalizer_metrics_by_group)
    return RolloutStateDiff(
        progress=_replaced(a.progress, b.progress),
        dataloader_state=_replaced(a.dataloader_state, b.dataloader_state),
        sampler_dispatch_index=_replaced(a.sampler_dispatch_index, b.sampler_dispatch_index),
        next_nemo_gym_task_index=_replaced(a.next_nemo_gym_task_index, b.next_nemo_gym_task_index),
        next_commit_index=_replaced(a.next_commit_index, b.next_commit_index),
        open_step=_replaced(a.open_step, b.open_step),
        sampler_stamps_target_steps=_replaced(
            runtime_a.sampler_stamps_target_steps, runtime_b.sampler_stamps_target_steps
        ),
        replacement_reserve=_reserve_diff(
            tuple(runtime_a.replacement_reserve), tuple(runtime_b.replacement_reserve)
        ),
        batch_shortfall=_map_diff(runtime_a.batch_shortfall, runtime_b.batch_shortfall),
        finalizer_metrics=MapDiff(
            put=tuple((name, tuple(sorted(values.items()))) for name, values in metrics.put),
            removed=metrics.removed,
        ),
        finalizer_rewards=_map_diff(
            runtime_a.finalizer_rewards_by_group, runtime_b.finalizer_rewards_by_group
        ),
        ledger=_map_diff(a.ledger.groups, b.ledger.groups),
        replay=_map_diff(a.replay, b.replay),
        outcomes=_map_diff(a.outcomes, b.outcomes),
        rows_to_clear=SetDiff(
            added=tuple(sorted(key for key in b.rows_to_clear if key not in a.rows_to_clear)),
            removed=tuple(sorted(key for key in a.rows_to_clear if key not in b.rows_to_clear)),
        ),
    )


def patch(a: RolloutState, change: RolloutStateDiff) -> RolloutState:
    """The state that `change` leads to from `a`. O(change * log n).

    Total: keys that are to go and are not there, or a reserve shorter than what is to be taken,
    are passed over. Whether `a` is the state that the diff was made from is the caller's to know.
    """
    runtime = a.runtime
    metrics = MapDiff(
        put=tuple((name, HashTrieMap(values)) for name, values in change.finalizer_metrics.put),
        removed=change.finalizer_metrics.removed,
    )
    return RolloutState(
        progress=_value(a.progress, change.progress),
        dataloader_state=_value(a.dataloader_state, change.dataloader_state),
        sampler_dispatch_index=_value(a.sampler_dispatch_index, change.sampler_dispatch_index),
        next_nemo_gym_task_index=_value(
            a.next_nemo_gym_task_index, change.next_nemo_gym_task_index
        ),
        runtime=RolloutRuntimeState(
            replacement_reserve=_patched_reserve(
                runtime.replacement_reserve, change.replacement_reserve
            ),
            batch_shortfall=_patched(runtime.batch_shortfall, change.batch_shortfall),
            sampler_stamps_target_steps=_value(
                runtime.sampler_stamps_target_steps, change.sampler_stamps_target_steps
            ),
            finalizer_metrics_by_group=_patched(runtime.finalizer_metrics_by_group, metrics),
            finalizer_rewards_by_group=_patched(
                runtime.finalizer_rewards_by_group, change.finalizer_rewards
            ),
        ),
        ledger=RolloutRecoveryLedger(groups=_patched(a.ledger.groups, change.ledger)),
        replay=_patched(a.replay, change.replay),
        next_commit_index=_value(a.next_commit_index, change.next_commit_index),
        open_step=_value(a.open_step, change.open_step),
        rows_to_clear=_patched_set(a.rows_to_clear, change.rows_to_clear),
        outcomes=_patched(a.outcomes, change.outcomes),
    )


def diff_lines(change: RolloutStateDiff) -> tuple[str, ...]:
    """The difference in lines for a person, most general first; empty for equal states."""
    return (*_counter_lines(change), *_runtime_lines(change), *_group_lines(change))


def _replaced(a: V, b: V) -> Replaced[V] | None:
    return None if a == b else Replaced(value=b)


def _value(old: V, change: Replaced[V] | None) -> V:
    return old if change is None else change.value


def _map_diff(a: Mapping[K, V], b: Mapping[K, V]) -> MapDiff[K, V]:
    put: list[tuple[K, V]] = []
    for key, value in b.items():
        old = a.get(key)
        # Not `!=`: by rpds, an empty map differs from an equal one.
        unchanged = old is value or old == value
        if not unchanged:
            put.append((key, value))
    put.sort(key=lambda entry: entry[0])
    return MapDiff(put=tuple(put), removed=tuple(sorted(key for key in a if key not in b)))


def _patched(old: HashTrieMap[K, V], change: MapDiff[K, V]) -> HashTrieMap[K, V]:
    for key in change.removed:
        old = old.discard(key)
    for key, value in change.put:
        old = old.insert(key, value)
    return old


def _patched_set(old: HashTrieSet[str], change: SetDiff) -> HashTrieSet[str]:
    for key in change.removed:
        old = old.discard(key)
    for key in change.added:
        old = old.insert(key)
    return old


def _reserve_diff(a: tuple[PromptReference, ...], b: tuple[PromptReference, ...]) -> ReserveDiff:
    """The fewest prompts to take so that what is left of `a` begins `b`. Prompts are distinct, so
    nearly every candidate fails at its first prompt, and this is O(n)."""
    for taken in range(len(a)):
        left = len(a) - taken
        if left <= len(b) and a[taken] == b[0] and a[taken:] == b[:left]:
            return ReserveDiff(taken=taken, appended=b[left:])
    return ReserveDiff(taken=len(a), appended=b)


def _patched_reserve(old: Queue[PromptReference], change: ReserveDiff) -> Queue[PromptReference]:
    for _ in range(min(change.taken, len(old))):
        old = old.dequeue()
    for prompt in change.appended:
        old = old.enqueue(prompt)
    return old


def _counter_lines(change: RolloutStateDiff) -> Iterable[str]:
    if change.progress is not None:
        new = change.progress.value
        yield (
            f"progress: now {new.train_steps} training steps, weight version "
            f"{new.trainer_version}, epoch {new.current_epoch}"
        )
    if change.dataloader_state is not None:
        place = change.dataloader_state.value
        yield f"dataloader: now at position {place.position} of epoch {place.epoch}"
    for name, counter in (
        ("dispatch index", change.sampler_dispatch_index),
        ("next task index", change.next_nemo_gym_task_index),
        ("next commit index", change.next_commit_index),
    ):
        if counter is not None:
            yield f"{name}: now {counter.value}"
    if change.open_step is not None:
        step = change.open_step.value
        if step is None:
            yield "open training step: now none"
        else:
            window = ", commit window open" if step.optimizer_commit_open else ""
            yield f"open training step: now {step.step}, {len(step.group_ids)} claims{window}"
    if change.sampler_stamps_target_steps is not None:
        yield f"sampler stamps target steps: now {change.sampler_stamps_target_steps.value}"


def _runtime_lines(change: RolloutStateDiff) -> Iterable[str]:
    reserve = change.replacement_reserve
    if reserve.taken:
        yield f"reserve: - {reserve.taken} from its front"
    for prompt in reserve.appended:
        yield f"reserve: + {prompt.prompt_id}"
    for step, count in change.batch_shortfall.put:
        yield f"shortfall of target step {step}: now {count}"
    for step in change.batch_shortfall.removed:
        yield f"shortfall of target step {step}: now none"
    rows = change.rows_to_clear
    if rows.added or rows.removed:
        yield f"rows to clear: + {len(rows.added)} - {len(rows.removed)}"
    metrics, rewards = change.finalizer_metrics, change.finalizer_rewards
    if metrics.put or metrics.removed:
        yield f"finalizer metrics: + {len(metrics.put)} - {len(metrics.removed)} groups"
    if rewards.put or rewards.removed:
        yield f"finalizer rewards: + {len(rewards.put)} - {len(rewards.removed)} groups"


def _group_lines(change: RolloutStateDiff) -> Iterable[str]:
    for group_id, record in change.ledger.put:
        sealed = sum(
            sibling.attempts[-1].status is RolloutAttemptStatus.SEALED
            for sibling in record.siblings
            if sibling.attempts
        )
        yield (
            f"ledger: {group_id} {record.phase}, {record.status}, "
            f"{sealed} of {record.expected_generations} siblings sealed"
        )
    yield from (f"ledger: - {group_id}" for group_id in change.ledger.removed)
    for group_id, group in change.replay.put:
        yield (
            f"replay: + {group_id} weight versions {group.start_weight_version} to "
            f"{group.end_weight_version}, target step {group.target_step}"
        )
    yield from (f"replay: - {group_id}" for group_id in change.replay.removed)
    for prompt_id, outcome in change.outcomes.put:
        how = f"dropped ({outcome.reason})" if isinstance(outcome, Dropped) else "trained"
        yield f"outcome: {prompt_id} {how} in step {outcome.step}"
    yield from (f"outcome: {prompt_id} withdrawn" for prompt_id in change.outcomes.removed)
