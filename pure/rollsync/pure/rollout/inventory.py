"""Do the state and the rows of the data plane agree? One check, used by saving and by restoring.

`take_inventory` is a pure comparison of a state with a listing of row keys. Saving asks
`saving_problems` (a row that is owned must be there); restoring asks `restoring_problems` as well,
which wants exact agreement: nothing missing, nothing too much, room for all, batches that add up.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import assert_never

from msgspec import Struct

from rollsync.pure.rollout._parts import staged_keys_of
from rollsync.pure.rollout.invariants import Violation, check_invariants
from rollsync.pure.rollout.persistent import values_of
from rollsync.pure.rollout.sampler import PromptGroupSampler, batches_unaccounted
from rollsync.pure.rollout.state import PromptGroupPhase, RolloutState


class RowsMissing(Struct, frozen=True, kw_only=True, tag=True):
    """A group owns rows that the data plane does not have."""

    group_id: str
    keys: tuple[str, ...]


class RowsUnowned(Struct, frozen=True, kw_only=True, tag=True):
    """The listing has rows that nothing in the state owns."""

    keys: tuple[str, ...]


class RuleBroken(Struct, frozen=True, kw_only=True, tag=True):
    """The state contradicts itself."""

    violation: Violation


class CapacityTooSmall(Struct, frozen=True, kw_only=True, tag=True):
    """The buffer cannot hold the groups that are admitted and untrained, or a policy's minimum."""

    needed: int
    capacity: int


class BatchesUnaccounted(Struct, frozen=True, kw_only=True, tag=True):
    """Groups do not add up to the batches that the cursor counts."""

    difference: int
    num_prompts_per_step: int


class StampingDiffers(Struct, frozen=True, kw_only=True, tag=True):
    """The state was written under a policy that stamps target steps, and this one does not, or the
    other way round."""

    state_stamps: bool


InventoryProblem = (
    RowsMissing | RowsUnowned | RuleBroken | CapacityTooSmall | BatchesUnaccounted | StampingDiffers
)


class Inventory(Struct, frozen=True, kw_only=True):
    """The state's rows against a listing of the data plane's."""

    replay_rows: tuple[str, ...]
    """Rows that ready groups own, sorted."""
    staging_rows: tuple[str, ...]
    """Rows that unfinished groups own, sorted."""
    missing: tuple[RowsMissing, ...]
    unowned: tuple[str, ...]
    """Listed, and neither owned nor waiting to be cleared. While a run goes on, these are rows
    staged by attempts that have not been sealed yet."""
    violations: tuple[Violation, ...]
    admitted_group_count: int
    replay_group_count: int


def owned_rows(state: RolloutState) -> tuple[str, ...]:
    """Every row that a save must keep: those of ready and of unfinished groups, sorted."""
    keys = [key for group in values_of(state.replay) for key in group.sample_ids]
    for record in values_of(state.ledger.groups):
        keys.extend(staged_keys_of(record))
    return tuple(sorted(keys))


def take_inventory(state: RolloutState, row_keys: Collection[str]) -> Inventory:
    """Compare the state with the keys of the rows that are there. O(rows log rows)."""
    present = frozenset(row_keys)
    missing: list[RowsMissing] = []
    replay_rows: list[str] = []
    for group in values_of(state.replay):
        replay_rows.extend(group.sample_ids)
        _note_missing(missing, group.group_id, group.sample_ids, present)
    staging_rows: list[str] = []
    admitted = 0
    for record in values_of(state.ledger.groups):
        admitted += record.phase is PromptGroupPhase.ADMITTED
        keys = staged_keys_of(record)
        if keys:
            staging_rows.extend(keys)
            _note_missing(missing, record.group_id, keys, present)
    unowned = present.difference(replay_rows, staging_rows)
    return Inventory(
        replay_rows=tuple(sorted(replay_rows)),
        staging_rows=tuple(sorted(staging_rows)),
        missing=tuple(sorted(missing, key=lambda each: each.group_id)),
        unowned=tuple(sorted(key for key in unowned if key not in state.rows_to_clear)),
        violations=check_invariants(state),
        admitted_group_count=admitted,
        replay_group_count=len(state.replay),
    )


def _note_missing(
    missing: list[RowsMissing], group_id: str, keys: tuple[str, ...], present: frozenset[str]
) -> None:
    if not present.issuperset(keys):
        absent = tuple(key for key in keys if key not in present)
        missing.append(RowsMissing(group_id=group_id, keys=absent))


def saving_problems(inventory: Inventory) -> tuple[InventoryProblem, ...]:
    """Why the state must not be saved: a resume from it would be wrong."""
    broken = tuple(RuleBroken(violation=each) for each in inventory.violations)
    return (*broken, *inventory.missing)


def restoring_problems(
    inventory: Inventory,
    state: RolloutState,
    *,
    sampler: PromptGroupSampler,
    num_prompts_per_step: int,
    buffer_capacity: int | None,
) -> tuple[InventoryProblem, ...]:
    """Why the state must not be resumed, by a run with these settings."""
    problems = list(saving_problems(inventory))
    if inventory.unowned:
        problems.append(RowsUnowned(keys=inventory.unowned))
    untrained = inventory.admitted_group_count + inventory.replay_group_count
    needed = max(untrained, sampler.required_buffer_capacity(num_prompts_per_step))
    if buffer_capacity is not None and buffer_capacity < needed:
        problems.append(CapacityTooSmall(needed=needed, capacity=buffer_capacity))
    if state.runtime.sampler_stamps_target_steps is not sampler.stamps_target_steps:
        problems.append(StampingDiffers(state_stamps=state.runtime.sampler_stamps_target_steps))
    difference = batches_unaccounted(sampler, state, num_prompts_per_step=num_prompts_per_step)
    if difference != 0:
        problems.append(
            BatchesUnaccounted(difference=difference, num_prompts_per_step=num_prompts_per_step)
        )
    return tuple(problems)


def describe_problem(problem: InventoryProblem) -> str:
    """The problem as a sentence that says what to do, where something can be done."""
    match problem:
        case RowsMissing():
            return f"group {problem.group_id} owns rows that are not there: {_some(problem.keys)}"
        case RowsUnowned():
            return f"rows that no group owns: {_some(problem.keys)}"
        case RuleBroken():
            broken = problem.violation
            return f"rule {broken.rule} is broken: {broken.subject} {broken.detail}"
        case CapacityTooSmall():
            return (
                f"the buffer's capacity is {problem.capacity} groups and {problem.needed} are "
                f"needed: raise the buffer capacity to at least {problem.needed}"
            )
        case BatchesUnaccounted():
            much = "more" if problem.difference > 0 else "fewer"
            return (
                f"there are {abs(problem.difference)} groups {much} than batches of "
                f"{problem.num_prompts_per_step} account for: resume with the "
                "num_prompts_per_step that the state was saved with"
            )
        case StampingDiffers():
            did = "stamps" if problem.state_stamps else "does not stamp"
            return (
                f"the state was saved under a sampler that {did} target steps: resume with a "
                "sampler of that kind"
            )
        case _:
            assert_never(problem)


def _some(keys: tuple[str, ...]) -> str:
    shown = ", ".join(keys[:5])
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"
