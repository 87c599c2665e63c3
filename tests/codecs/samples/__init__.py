"""Sample values of every kind: what the golden files hold and what hostile input starts from.

One module per kind, with `SAMPLES: dict[str, DomainStruct]`; the keys name the cases. Every kind
has at least `full` (every field filled, every collection with two members) and `empty` (every
optional absent, every collection empty); where it has numbers also `extremes` (the smallest and
largest legal ones), and where it has text `non-ascii`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.codecs.samples import (
    data_plane_checkpoint,
    recovery_ledger,
    refit_control,
    refit_plan,
    replay_metadata,
    rollout_state,
    snapshot_anchor,
    snapshot_manifest,
    state_diff,
)

SAMPLES: Final[Mapping[str, Mapping[str, object]]] = {
    "refit.control": refit_control.SAMPLES,
    "refit.plan": refit_plan.SAMPLES,
    "rollout.data-plane-checkpoint": data_plane_checkpoint.SAMPLES,
    "rollout.recovery-ledger": recovery_ledger.SAMPLES,
    "rollout.replay-metadata": replay_metadata.SAMPLES,
    "rollout.state": rollout_state.SAMPLES,
    "rollout.state-diff": state_diff.SAMPLES,
    "snapshot.anchor": snapshot_anchor.SAMPLES,
    "snapshot.manifest": snapshot_manifest.SAMPLES,
}
