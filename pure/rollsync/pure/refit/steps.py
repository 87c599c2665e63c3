"""The steps of a sync, by the names under which workers are asked for them.

Rule kept here: the names are NeMo-RL's, so that its workers and rollsync's answer to the same ones.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Step(StrEnum):
    """What both sides are asked to do, by the name of the policy's half."""

    MEASURE = "checkpoint_engine_total_memory_bytes"
    MAKE = "init_checkpoint_engine"
    PREPARE = "prepare_checkpoint_engine"
    CONNECT = "init_checkpoint_engine_process_group"
    TRANSFER = "send_weights_via_checkpoint_engine"
    FINALIZE = "finalize_checkpoint_engine"


UPDATE: Final = "update_weights_from_checkpoint_engine"
"""The engines' half of `Step.TRANSFER`: the only step whose halves differ in name."""
