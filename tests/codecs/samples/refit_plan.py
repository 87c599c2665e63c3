"""Sample values of `refit.plan`."""

from __future__ import annotations

from typing import Final

from rollsync.pure.refit import MEBIBYTE, DeclaredPlan, TensorSpec

LARGEST: Final = 2**63 - 1

SAMPLES: Final = {
    "full": DeclaredPlan(
        plan_version=1,
        bucket_bytes=64 * MEBIBYTE,
        tensors=(
            TensorSpec("embed.weight", (1000, 8), "bfloat16", ("lm_head.weight", "head")),
            TensorSpec("norm.weight[0:4]", (4,), "float32", ("a", "b")),
        ),
    ),
    "empty": DeclaredPlan(plan_version=0, bucket_bytes=0, tensors=()),
    "extremes": DeclaredPlan(
        plan_version=LARGEST,
        bucket_bytes=LARGEST,
        tensors=(
            TensorSpec("", (), "", ("",)),
            TensorSpec("", (0, LARGEST, LARGEST), "int8", ()),
        ),
    ),
    "non-ascii": DeclaredPlan(
        plan_version=1,
        bucket_bytes=256,
        tensors=(TensorSpec("gewicht-größe\x00\n", (1,), "浮点", ("вес", "𝄞")),),
    ),
}
