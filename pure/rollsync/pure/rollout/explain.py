"""A resume plan in words, for people who want to know before anything changes."""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from rollsync.pure.rollout.resume import (
    DiscardedAsCanonical,
    DroppedAsUnrecoverable,
    GroupPlan,
    KeptReady,
    Readmitted,
    ReadyRegenerated,
    RestartedWhole,
    ResumePlan,
    ReturnedToReserve,
    SiblingsResumed,
)


def explain(plan: ResumePlan) -> tuple[str, ...]:
    """The plan in lines: where the run goes on, counts, then a line a group with its reason."""
    state = plan.state
    position = state.dataloader_state
    counts = Counter(_what(group) for group in plan.groups)
    return (
        f"resume after training step {state.progress.train_steps}, "
        f"weight version {state.progress.trainer_version}, "
        f"dispatch batch {state.sampler_dispatch_index}; "
        f"next prompt: position {position.position} of epoch {position.epoch}",
        f"{len(plan.groups)} groups: "
        + (", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"),
        f"{len(plan.rows_to_load)} rows to load, {len(plan.dispatches)} siblings to generate, "
        f"{len(plan.to_finalize)} groups to finalize, "
        f"{len(state.runtime.replacement_reserve)} spare prompts",
        *(f"  {group.group_id}: {_what(group)} ({_why(group)})" for group in plan.groups),
    )


def _what(group: GroupPlan) -> str:
    match group:
        case KeptReady():
            return "kept as ready"
        case ReadyRegenerated():
            return "generated again"
        case SiblingsResumed():
            return "resumed"
        case RestartedWhole():
            return "restarted whole"
        case Readmitted():
            return "admitted again"
        case ReturnedToReserve():
            return "returned to the reserve"
        case DiscardedAsCanonical():
            return "discarded as already canonical"
        case DroppedAsUnrecoverable():
            return "dropped as unrecoverable"
        case _:
            assert_never(group)


def _why(group: GroupPlan) -> str:
    match group:
        case KeptReady():
            return "its rows are loaded"
        case ReadyRegenerated():
            return "it was ready, and the buffer is not loaded"
        case SiblingsResumed():
            return f"{_siblings(group.sealed)} kept, {_siblings(group.regenerate)} generated again"
        case RestartedWhole():
            return f"recovered by prompt group; sealed and discarded: {_siblings(group.discarded)}"
        case Readmitted():
            return "it was reserved, and no batch counts it yet"
        case ReturnedToReserve():
            return "it was reserved, and reserved prompts become spares"
        case DiscardedAsCanonical():
            return f"its prompt is {group.place} already"
        case DroppedAsUnrecoverable():
            return (
                f"{group.recovery_count} resumes found it running without progress, "
                f"{group.failed_attempts} attempts of a sibling failed"
            )
        case _:
            assert_never(group)


def _siblings(indices: tuple[int, ...]) -> str:
    """Which ones, so that an index is not read as a count."""
    if not indices:
        return "no sibling"
    *others, last = map(str, indices)
    return f"siblings {', '.join(others)} and {last}" if others else f"sibling {last}"
