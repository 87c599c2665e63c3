"""The workers of a refit that does not run yet, and the plan of that refit.

Rule kept here: what the workers of a sync would tell each other of themselves (hosts, ranks, what
they keep) follows from a few sizes; all else is decided by the functions that decide in a sync.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.cuts import Attention
from rollsync.pure.refit.errors import (
    LayoutError,
    ParallelError,
    PlanError,
    RouteError,
    TooManyLayouts,
)
from rollsync.pure.refit.estimate import Links, RefitEstimate, estimate_refit
from rollsync.pure.refit.parallel import Parallelism, plan_shards, whole_model
from rollsync.pure.refit.plan_limits import beyond
from rollsync.pure.refit.routes import Sites, plan_routes


class Deployment(Struct, frozen=True, kw_only=True):
    """Who takes part, and where.

    Attributes:
        train_world_size: Number of policy workers.
        engines: How the rollout workers are grouped.
        whole: Every rollout worker is sent whole tensors.
        workers_per_host: Workers of one side on a host, between which relays are planned; None: no
            two share a host, and nothing is relayed.
        shared_hosts: The n-th host of one side is the n-th of the other.
    """

    train_world_size: int
    engines: Parallelism
    whole: bool = False
    workers_per_host: int | None = None
    shared_hosts: bool = False


def plan_refit(
    specs: Sequence[TensorSpec],
    attention: Attention,
    deployment: Deployment,
    *,
    bucket_bytes: int,
    links: Links,
) -> Result[RefitEstimate, ParallelError | RouteError | PlanError | LayoutError | TooManyLayouts]:
    """The figures of one refit, within seconds, or why there are none.

    Args:
        specs: The model's tensors in stream order.
        attention: What its configuration says of it.
        deployment: The workers.
        bucket_bytes: Size of one bucket.
        links: How fast bytes move.
    """
    engines = deployment.engines
    too_many = beyond("policy workers", deployment.train_world_size)
    if too_many is not None:
        return Failure(too_many)
    shards = plan_shards(specs, engines, attention)
    if not is_successful(shards):
        return Failure(shards.failure())
    sites = sites_of(deployment)
    relays = None if deployment.workers_per_host is None else sites
    table = plan_routes(deployment.train_world_size, engines.rollout_world_size, relays)
    if not is_successful(table):
        return Failure(table.failure())
    kept = shards.unwrap()
    if deployment.whole:
        kept = whole_model(specs, engines.rollout_world_size)
    return estimate_refit(
        specs, kept, table.unwrap(), sites, bucket_bytes=bucket_bytes, links=links
    )


def sites_of(deployment: Deployment) -> Sites:
    """Where the workers are, as they would report it."""
    engines, per_host = deployment.engines, deployment.workers_per_host or 1
    policy, rollout = ("host", "host") if deployment.shared_hosts else ("policy", "rollout")
    ranks_of_engine = engines.tensor_parallel * engines.pipeline_parallel
    rollout_ranks = range(engines.rollout_world_size)
    return Sites(
        policy_hosts=tuple(f"{policy}-{r // per_host}" for r in range(deployment.train_world_size)),
        rollout_hosts=tuple(f"{rollout}-{r // per_host}" for r in rollout_ranks),
        # As in a sync, those relay to each other that have one rank in engines of equal size.
        rollout_shards=tuple(r % ranks_of_engine for r in rollout_ranks),
    )
