"""`rollout.state-diff`: what leads from one rollout state to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from returns.result import Failure, Result, Success

from rollsync.codecs.canonical import strictly_increasing
from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.rollout.state_diff import v1
from rollsync.pure.rollout.diff import RolloutStateDiff


def to_wire(change: RolloutStateDiff) -> RolloutStateDiff:
    """The difference as it is: it has the shape of the newest wire struct."""
    return change


def from_wire(wire: v1.RolloutStateDiff) -> Result[RolloutStateDiff, Refusal]:
    """The difference, provided that each part is sorted by its key."""
    for name, in_order in _orders(wire):
        if not in_order:
            return Failure(f"{name} is sorted by its key, each key once")
    # Through plain data, in which a tagged struct still has its tag.
    builtins: object = msgspec.to_builtins(wire)
    return Success(msgspec.convert(builtins, RolloutStateDiff))


def _orders(wire: v1.RolloutStateDiff) -> Iterator[tuple[str, bool]]:
    for name, part in (
        ("finalizer_metrics", wire.finalizer_metrics),
        ("finalizer_rewards", wire.finalizer_rewards),
        ("ledger", wire.ledger),
        ("replay", wire.replay),
        ("outcomes", wire.outcomes),
    ):
        yield name, strictly_increasing([entry[0] for entry in part.put])
        yield name, strictly_increasing(part.removed)
    shortfall = wire.batch_shortfall
    yield "batch_shortfall", strictly_increasing([step for step, _ in shortfall.put])
    yield "batch_shortfall", strictly_increasing(shortfall.removed)
    for _, metrics in wire.finalizer_metrics.put:
        yield "finalizer_metrics", strictly_increasing([name for name, _ in metrics])
    yield "rows_to_clear", strictly_increasing(wire.rows_to_clear.added)
    yield "rows_to_clear", strictly_increasing(wire.rows_to_clear.removed)


STATE_DIFF: Final = kind(
    "rollout.state-diff",
    domain=RolloutStateDiff,
    history=first(v1.RolloutStateDiff),
    to_wire=to_wire,
    from_wire=from_wire,
)
