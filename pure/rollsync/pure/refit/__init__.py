"""Decisions about moving a policy's weights into generation engines.

    plan = plan_buckets([TensorSpec("model.norm.weight", (896,), "bfloat16")], 64 * MEBIBYTE)

Every function here is pure: it neither moves nor reads a weight. `rollsync.shell.refit` gathers
what these functions ask for, and carries out what they answer.
"""

from typing import Final

from rollsync.pure.refit.buckets import (
    ALIGNMENT_BYTES,
    BucketPlan,
    Chunk,
    Cursor,
    Placement,
    TensorSpec,
    check_bucket_bytes,
    check_tensor,
    place_tensor,
    plan_buckets,
)
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.errors import PlanError, describe

MEBIBYTE: Final = 1024 * 1024

__all__ = [
    "ALIGNMENT_BYTES",
    "DTYPE_BYTES",
    "MEBIBYTE",
    "BucketPlan",
    "Chunk",
    "Cursor",
    "Placement",
    "PlanError",
    "TensorSpec",
    "check_bucket_bytes",
    "check_tensor",
    "describe",
    "place_tensor",
    "plan_buckets",
]
