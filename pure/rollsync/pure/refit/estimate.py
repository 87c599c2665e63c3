"""What a refit will move, hold and take, before anything runs.

The time is that of the links, with packing and loading hidden behind them: the receivers of a
worker share its link evenly, so they all have everything when it has sent everything, and a relay
is at least one bucket behind the worker that it relays.

Rule kept here: every figure follows from the same plans and routes that the engines execute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import BucketPlan, TensorSpec, plan_buckets
from rollsync.pure.refit.errors import LayoutError, PlanError
from rollsync.pure.refit.layout import check_coverage, plan_parts
from rollsync.pure.refit.parallel import Shards
from rollsync.pure.refit.routes import (
    PolicyWorker,
    RolloutWorker,
    Route,
    RoutingTable,
    Sites,
    Worker,
    choose_engine,
)

BUCKETS_PER_WORKER: Final = 2


Engine = Literal["shm", "nixl"]


class Links(Struct, frozen=True, kw_only=True):
    """How fast bytes move.

    Attributes:
        between_hosts: Bytes a second that one worker sends to other hosts.
        inside_host: Bytes a second that one worker sends to workers on its own host.
    """

    between_hosts: float
    inside_host: float


class RouteEstimate(Struct, frozen=True, kw_only=True):
    """What one rollout worker is sent.

    Attributes:
        rollout_rank: The receiver.
        sender: `policy` or `rollout`.
        sender_rank: The sender's rank on its side.
        policy_rank: Where the route begins.
        shard: The receiver's layout.
        engine: The built-in engine for this route.
        tensors: How many tensors or parts of tensors are sent.
        payload_bytes: Their bytes.
        padding_bytes: Bytes between them that move as well.
        buckets: How many buckets move; all but the last are full.
        last_bucket_bytes: How far the last one is filled.
        seconds: From the start of the sync until the last byte is here.
    """

    rollout_rank: int
    sender: Literal["policy", "rollout"]
    sender_rank: int
    policy_rank: int
    shard: int
    engine: Engine
    tensors: int
    payload_bytes: int
    padding_bytes: int
    buckets: int
    last_bucket_bytes: int
    seconds: float


class LargestTensor(Struct, frozen=True, kw_only=True):
    """The largest tensor of the model."""

    name: str
    tensor_bytes: int
    buckets: float
    """How many buckets it fills; above 1 it is sent in chunks."""


class RefitEstimate(Struct, frozen=True, kw_only=True):
    """All figures of a refit.

    Attributes:
        parameters_bytes: Bytes of the model, tied weights once.
        tensors: How many tensors the model has.
        bucket_bytes: Size of one bucket.
        reserved_bytes_per_worker: Buffers that each worker holds.
        reserved_bytes: Buffers of all workers.
        largest: The largest tensor; None for a model without tensors.
        sent_bytes: What all routes move, padding included.
        seconds: Until the last rollout worker has everything.
        idle_policy_ranks: Policy workers that send nothing.
        routes: One for each rollout worker, by rank.
    """

    parameters_bytes: int
    tensors: int
    bucket_bytes: int
    reserved_bytes_per_worker: int
    reserved_bytes: int
    largest: LargestTensor | None
    sent_bytes: int
    seconds: float
    idle_policy_ranks: tuple[int, ...]
    routes: tuple[RouteEstimate, ...]


def estimate_refit(
    specs: Sequence[TensorSpec],
    shards: Shards,
    table: RoutingTable,
    sites: Sites,
    *,
    bucket_bytes: int,
    links: Links,
) -> Result[RefitEstimate, PlanError | LayoutError]:
    """The figures of one refit.

    Args:
        specs: The model's tensors in stream order.
        shards: What each rollout rank keeps.
        table: Who sends to whom.
        sites: On which hosts the workers are.
        bucket_bytes: Size of one bucket.
        links: How fast bytes move.
    """
    plans: list[BucketPlan] = []
    for shard, layout in enumerate(shards.layouts):
        rank = shards.shard_of_rank.index(shard)
        parts = plan_parts(specs, layout, rank=rank)
        if not is_successful(parts):
            return Failure(parts.failure())
        plan = plan_buckets((part.spec for part in parts.unwrap()), bucket_bytes)
        if not is_successful(plan):
            return Failure(plan.failure())
        plans.append(plan.unwrap())
    uncovered = check_coverage(specs, shards.layouts)
    if uncovered is not None:
        return Failure(uncovered)
    seconds = _seconds([plans[shard] for shard in shards.shard_of_rank], table, sites, links)
    routes = tuple(
        _route(rank, plans[shard], shard, table, sites, seconds[rank])
        for rank, shard in enumerate(shards.shard_of_rank)
    )
    workers = table.train_world_size + table.rollout_world_size
    return Success(
        RefitEstimate(
            parameters_bytes=sum(spec.tensor_bytes for spec in specs),
            tensors=len(specs),
            bucket_bytes=bucket_bytes,
            reserved_bytes_per_worker=BUCKETS_PER_WORKER * bucket_bytes,
            reserved_bytes=workers * BUCKETS_PER_WORKER * bucket_bytes,
            largest=_largest(specs, bucket_bytes),
            sent_bytes=sum(route.payload_bytes + route.padding_bytes for route in routes),
            seconds=max(seconds),
            idle_policy_ranks=table.idle_policy_ranks,
            routes=routes,
        )
    )


def _largest(specs: Sequence[TensorSpec], bucket_bytes: int) -> LargestTensor | None:
    if not specs:
        return None
    spec = max(specs, key=lambda each: each.tensor_bytes)
    return LargestTensor(
        name=spec.name, tensor_bytes=spec.tensor_bytes, buckets=spec.tensor_bytes / bucket_bytes
    )


def _route(
    rank: int, plan: BucketPlan, shard: int, table: RoutingTable, sites: Sites, seconds: float
) -> RouteEstimate:
    sender = table.sender_to(rank)
    return RouteEstimate(
        rollout_rank=rank,
        sender="policy" if isinstance(sender, PolicyWorker) else "rollout",
        sender_rank=sender.rank,
        policy_rank=table.path_to(rank)[0].rank,
        shard=shard,
        engine=_engine(sender, rank, sites),
        tensors=len(plan.placements),
        payload_bytes=plan.payload_bytes,
        padding_bytes=plan.moved_bytes - plan.payload_bytes,
        buckets=len(plan.filled_bytes),
        last_bucket_bytes=plan.filled_bytes[-1] if plan.filled_bytes else 0,
        seconds=seconds,
    )


def _engine(sender: Worker, receiver_rank: int, sites: Sites) -> Engine:
    hosts = sites.policy_hosts if isinstance(sender, PolicyWorker) else sites.rollout_hosts
    route = Route(sender, RolloutWorker(receiver_rank))
    return choose_engine(route, hosts[sender.rank], sites.rollout_hosts[receiver_rank]).engine


def _seconds(
    plans: Sequence[BucketPlan], table: RoutingTable, sites: Sites, links: Links
) -> list[float]:
    """For each rollout rank, whose plan is at its index, when it has everything."""
    speed_of: dict[Engine, float] = {"shm": links.inside_host, "nixl": links.between_hosts}
    over_link = [
        (route.sender, _engine(route.sender, route.receiver.rank, sites)) for route in table.routes
    ]
    busy: dict[tuple[Worker, Engine], float] = {}
    for link, plan in zip(over_link, plans, strict=True):
        busy[link] = busy.get(link, 0.0) + plan.moved_bytes / speed_of[link[1]]
    seconds: list[float] = []
    for rank, link in enumerate(over_link):
        done = busy[link]
        # A relay has a lower rank than whom it relays to, so its time is known.
        if not isinstance(link[0], PolicyWorker):
            one_bucket = max(plans[rank].filled_bytes, default=0) / speed_of[link[1]]
            done = max(done, seconds[link[0].rank] + one_bucket)
        seconds.append(done)
    return seconds
