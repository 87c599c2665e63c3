"""`rollsync.pure.refit` in someone else's program."""

from typing import assert_type

from returns.result import Result

from rollsync.pure.refit import MEBIBYTE, BucketPlan, PlanError, TensorSpec, describe, plan_buckets

assert_type(64 * MEBIBYTE, int)

spec = TensorSpec("model.norm.weight", (896,), "bfloat16", aliases=("norm",))
assert_type(spec.tensor_bytes, int)

result = plan_buckets([spec], 64 * MEBIBYTE)
assert_type(result, Result[BucketPlan, PlanError])
assert_type(describe(result.failure()), str)


def buckets(plan: BucketPlan) -> int:
    for placement in plan.placements:
        assert_type(placement.spec, TensorSpec)
    return len(plan.filled_bytes)


# A result is not the plan: the failure has to be looked at.
buckets(result)  # type: ignore[arg-type]

# A plan is a value: nothing changes it.
result.unwrap().bucket_bytes = 1  # type: ignore[misc]

# A bucket is not half a byte large.
plan_buckets([spec], 0.5)  # type: ignore[arg-type]

# A shape is a tuple, so that the spec can be hashed and compared.
TensorSpec("w", [896], "bfloat16")  # type: ignore[arg-type]
