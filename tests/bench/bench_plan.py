"""Planning a refit: 100,000 tensors, and a published mixture of experts.

Goal: the bucket plan of 100,000 tensors takes at most 0.3 s on one core. It is set beside a walk
over the same tensors that only adds up their bytes, which says how fast the machine was.
"""

from __future__ import annotations

from rollsync.codecs import encode
from rollsync.pure.refit import (
    MEBIBYTE,
    BucketPlan,
    TensorSpec,
    declare,
    plan_buckets,
    plan_digest,
)
from rollsync.pure.refit.model_shapes import attention_of, model_tensors
from rollsync.pure.refit.parallel import Parallelism, Shards, plan_shards
from tests.bench.measure import machine, medians_s, write_results
from tests.pure.refit.published_models import QWEN3_235B_A22B

TENSORS = 100_000
ROUNDS = 7
GOAL_S = 0.3
SPECS = [
    TensorSpec(f"model.layers.{n // 10}.block.{n % 10}.weight", (64, 16 + n % 7), "bfloat16")
    for n in range(TENSORS)
]
PUBLISHED = model_tensors(QWEN3_235B_A22B.config).unwrap()


def plan_all(bucket_bytes: int) -> BucketPlan:
    """The plan of all the tensors."""
    return plan_buckets(SPECS, bucket_bytes).unwrap()


def shard_published() -> Shards:
    """The layouts of 16 ranks that share the experts."""
    parallelism = Parallelism(rollout_world_size=16, tensor_parallel=4, expert_parallel=16)
    attention = attention_of(QWEN3_235B_A22B.config)
    return plan_shards(PUBLISHED, parallelism, attention).unwrap()


def measure() -> dict[str, object]:
    """Medians of all, and ratios to the walk."""
    declared = declare(plan_all(64 * MEBIBYTE))
    seconds = medians_s(
        {
            "walk": lambda: sum(spec.tensor_bytes for spec in SPECS),
            "plan, buckets of 64 MiB": lambda: plan_all(64 * MEBIBYTE),
            "plan, buckets of 1 MiB": lambda: plan_all(MEBIBYTE),
            "digest": lambda: plan_digest(declared),
            "encode the declaration": lambda: encode(declared),
            "shapes of Qwen3-235B-A22B": lambda: model_tensors(QWEN3_235B_A22B.config),
            "16 layouts of Qwen3-235B-A22B": shard_published,
        },
        rounds=ROUNDS,
    )
    plan_s = max(seconds["plan, buckets of 64 MiB"], seconds["plan, buckets of 1 MiB"])
    return {
        "tensors": TENSORS,
        "median_ms": {name: round(value * 1e3, 1) for name, value in seconds.items()},
        "to_walk": {name: round(value / seconds["walk"], 2) for name, value in seconds.items()},
        "goal": {"plan_s": GOAL_S, "met": plan_s <= GOAL_S},
    }


if __name__ == "__main__":
    write_results({"machine": machine(["msgspec"]), "plan": measure()})
