"""Version 1 of the data-plane checkpoint's metadata."""

from __future__ import annotations

from typing import Literal

from rollsync.codecs.canonical import Natural, Sha256Hex, Wire


class DataPlaneCheckpoint(Wire, frozen=True, kw_only=True):
    """What a data plane's saved part belongs to."""

    schema_version: Natural
    train_steps: Natural
    trainer_version: Natural
    current_epoch: Natural
    partition_id: str
    sampler_name: str
    mode: Literal["trainer_checkpoint", "rollout_snapshot"]
    replay_digest: Sha256Hex
    replay_group_count: Natural
    ledger_schema_version: Natural
    ledger_digest: Sha256Hex
    ledger_group_count: Natural
