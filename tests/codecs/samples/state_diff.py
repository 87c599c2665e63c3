"""Sample values of `rollout.state-diff`: differences of the samples of `rollout.state`."""

from __future__ import annotations

from typing import Final

import msgspec

from rollsync.pure.rollout.diff import RolloutStateDiff, SetDiff, diff
from tests.codecs.samples.rollout_state import EMPTY, EXTREMES, FULL, NON_ASCII


def _both_ways(change: RolloutStateDiff, back: RolloutStateDiff) -> RolloutStateDiff:
    """`change`, with what `back` takes away as removed too: every field filled."""
    filled: dict[str, object] = {
        name: msgspec.structs.replace(getattr(change, name), removed=getattr(back, name).removed)
        for name in (
            "batch_shortfall",
            "finalizer_metrics",
            "finalizer_rewards",
            "ledger",
            "replay",
            "outcomes",
            "rows_to_clear",
        )
    }
    taken = msgspec.structs.replace(change.replacement_reserve, taken=2)
    return msgspec.structs.replace(change, replacement_reserve=taken, **filled)


SAMPLES: Final = {
    "full": _both_ways(diff(EMPTY, FULL), diff(FULL, EMPTY)),
    "empty": RolloutStateDiff(),
    "extremes": diff(FULL, EXTREMES),
    "non-ascii": diff(EMPTY, NON_ASCII),
    "rows-only": RolloutStateDiff(rows_to_clear=SetDiff(added=("group-z/0",))),
}
