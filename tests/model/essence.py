"""What of a moment can still matter: moments with the same essence have the same future.

Left out: attempts that a crash abandoned (only how many failed is ever asked for), the numbers that
attempts therefore have, in row keys too, how often a group was recovered (the bound on it is above
the number of crashes explored), and absolute commit indices (only their order is ever used).
Everything else of the world and of the state is kept as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from rollsync.pure.rollout import (
    PromptGroupRecoveryRecord,
    ReplayGroup,
    failed_attempts,
)
from tests.model.world import Node


def essence(node: Node) -> Hashable:
    """A key that is equal for moments with the same future."""
    state = node.state
    replay = sorted(state.replay.values(), key=lambda group: group.commit_index)
    return (
        state.progress,
        state.dataloader_state,
        state.sampler_dispatch_index,
        tuple(state.runtime.replacement_reserve),
        state.runtime.batch_shortfall,
        tuple(_record(key, state.ledger.groups[key]) for key in sorted(state.ledger.groups)),
        tuple(_group(group) for group in replay),
        state.open_step,
        state.outcomes,
        _unnumbered(state.rows_to_clear),
        _unnumbered(node.rows),
        node.weights,
        tuple(sorted((group_id, sibling) for group_id, sibling, _ in node.running)),
        node.served,
        node.training,
        node.anchored,
        node.crashes,
        node.faults,
    )


def _record(key: str, record: PromptGroupRecoveryRecord) -> tuple[Hashable, ...]:
    siblings = tuple(
        (failed_attempts(sibling), sibling.attempts[-1].status, sibling.attempts[-1].reward)
        for sibling in record.siblings
    )
    return (
        key,
        record.group_id,
        record.admission_id or "",
        record.phase,
        record.status,
        -1 if record.target_step is None else record.target_step,
        -1 if record.start_weight_version is None else record.start_weight_version,
        record.granularity,
        siblings,
    )


def _group(group: ReplayGroup) -> tuple[Hashable, ...]:
    return (
        group.group_id,
        group.admission_id,
        group.target_step,
        group.start_weight_version,
        group.end_weight_version,
        group.sample_ids,
        group.rewards,
    )


def _unnumbered(keys: Iterable[str]) -> frozenset[str]:
    return frozenset(key.partition("attempt-")[0] for key in keys)
