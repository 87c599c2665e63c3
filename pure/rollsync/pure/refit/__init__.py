"""Decisions about moving a policy's weights into generation engines.

    plan = plan_buckets([TensorSpec("model.norm.weight", (896,), "bfloat16")], 64 * MEBIBYTE)
    table = plan_routes(train_world_size=2, rollout_world_size=4)

Every function here is pure: it neither moves nor reads a weight. `rollsync.shell.refit` gathers
what these functions ask for, and carries out what they answer. Expected errors are values in a
`Result`; `describe` puts them into words.

The modules: `buckets` (where each byte lies), `agreement` (of two sides on that), `bucket_size`,
`metadata` (the order of the workers), `routes` (who sends to whom), `relays` (what one that hands
on says for all behind it), `layout` (what a rank keeps, and is sent), `parallel` (that, for tensor,
pipeline and expert parallel engines), `cuts` (that, for one tensor), `load_events` (what
is written down of a rank's loader), `seen_load` and `seen_memory` (what these events say),
`load_plan` (what the loader does with what it is sent), `kept` (what it needs for that), `learned`
(what is known of it from one stream to the next), `direct` (what needs no loader),
`lifecycle` (what an engine may generate with), `model_shapes` (the tensors of a published model),
`fused_experts` (those of a trainer's), `estimate` (what a refit will take), `deployment` (that,
where no worker runs yet), `plan_limits` (for how many), `patience` (how long a sync waits),
`dtypes`, `errors`, `describe`.
"""

from rollsync.pure.refit.agreement import (
    PLAN_VERSION,
    DeclaredPlan,
    check_sent,
    declare,
    first_difference,
    plan_digest,
)
from rollsync.pure.refit.bucket_size import (
    MEBIBYTE,
    host_memory_share,
    parse_ratio,
    resolve_bucket_bytes,
)
from rollsync.pure.refit.buckets import (
    ALIGNMENT_BYTES,
    BucketPlan,
    Chunk,
    Cursor,
    Placement,
    TensorSpec,
    check_bucket_bytes,
    check_tensor,
    chunk_after,
    place_first,
    place_tensor,
    plan_buckets,
)
from rollsync.pure.refit.describe import describe
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.errors import PlanDifference, PlanError, RefitErrorValue
from rollsync.pure.refit.metadata import (
    Topology,
    flatten_metadata,
    ordered_generation_metadata,
    plan_topology,
    rollout_rank,
    sort_ranked_metadata,
)
from rollsync.pure.refit.routes import (
    EngineChoice,
    PolicyWorker,
    RolloutWorker,
    Route,
    RoutingTable,
    Sites,
    choose_engine,
    plan_routes,
)

__all__ = [
    "ALIGNMENT_BYTES",
    "DTYPE_BYTES",
    "MEBIBYTE",
    "PLAN_VERSION",
    "BucketPlan",
    "Chunk",
    "Cursor",
    "DeclaredPlan",
    "EngineChoice",
    "Placement",
    "PlanDifference",
    "PlanError",
    "PolicyWorker",
    "RefitErrorValue",
    "RolloutWorker",
    "Route",
    "RoutingTable",
    "Sites",
    "TensorSpec",
    "Topology",
    "check_bucket_bytes",
    "check_sent",
    "check_tensor",
    "choose_engine",
    "chunk_after",
    "declare",
    "describe",
    "first_difference",
    "flatten_metadata",
    "host_memory_share",
    "ordered_generation_metadata",
    "parse_ratio",
    "place_first",
    "place_tensor",
    "plan_buckets",
    "plan_digest",
    "plan_routes",
    "plan_topology",
    "resolve_bucket_bytes",
    "rollout_rank",
    "sort_ranked_metadata",
]
