"""What a refit will move, hold and take, before anything runs.

The figures are those of a sync in which every rank is sent what it keeps; in the first one of a
run, its loader has still to show what that is, and it is sent whole tensors.

The time is that of the links, with packing and loading hidden behind them: the receivers of a
worker share its link evenly, so they all have everything when it has sent everything, and a relay
is at least one bucket behind the worker that it relays.

Rule kept here: every figure follows from the same plans and routes that the engines execute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import StreamSize, TensorSpec, measure_stream
from rollsync.pure.refit.errors import LayoutError, PlanError, TooManyLayouts
from rollsync.pure.refit.layout import Part, SentBytes, check_coverage, plan_parts, sent_bytes
from rollsync.pure.refit.parallel import Shards
from rollsync.pure.refit.ring import Ring
from rollsync.pure.refit.routes import (
    PolicyWorker,
    Route,
    RoutingTable,
    Sites,
    Worker,
    choose_engine,
)
from rollsync.pure.refit.sharing import share_buffers

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
        engine: What carries this route: `shm` inside a host, `nixl` between hosts.
        tensors: Of how many tensors something is sent.
        parts: How many parts of them are sent, each of them whole or a slice.
        sent_whole: It is sent whole tensors, because others of its chain of relays keep other
            parts of them.
        payload_bytes: Bytes of the parts.
        padding_bytes: Bytes between them that move as well.
        bucket_bytes: Size of a bucket of this stream: its share of its policy worker's buckets,
            which has a stream for each layout that it sends.
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
    parts: int
    sent_whole: bool
    payload_bytes: int
    padding_bytes: int
    bucket_bytes: int
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
        reserved_bytes_per_worker: Buffers of each worker that has some: of who sends, and of who
            receives from another host. A policy worker that feeds nobody has none, and who
            receives on its sender's host reads from the sender's.
        reserved_bytes: Buffers of all workers.
        assembly_bytes_per_receiver: Memory that a receiver keeps besides, in which what its two
            buckets cannot hold is put together; 0 where they can hold every part.
        largest: The largest tensor; None for a model without tensors.
        sent_bytes: What all routes move, padding included.
        sent_bytes_by_policy_rank: What of that each policy worker sends.
        most_sent_bytes: By one worker, of either side.
        seconds: Until the last rollout worker has everything.
        idle_policy_ranks: Policy workers that send nothing.
        routes: One for each rollout worker, by rank.
    """

    parameters_bytes: int
    tensors: int
    bucket_bytes: int
    reserved_bytes_per_worker: int
    reserved_bytes: int
    assembly_bytes_per_receiver: int
    largest: LargestTensor | None
    sent_bytes: int
    sent_bytes_by_policy_rank: tuple[int, ...]
    most_sent_bytes: int
    seconds: float
    idle_policy_ranks: tuple[int, ...]
    routes: tuple[RouteEstimate, ...]


class _Stream(NamedTuple):
    """What one rollout worker is sent, and through which buckets."""

    shard: int | None
    """Which layout; None: whole tensors."""
    bucket_bytes: int


class _Size(NamedTuple):
    tensors: int
    parts: int
    stream: StreamSize


def estimate_refit(
    specs: Sequence[TensorSpec],
    shards: Shards,
    table: RoutingTable,
    sites: Sites,
    *,
    bucket_bytes: int,
    links: Links,
) -> Result[RefitEstimate, PlanError | LayoutError | TooManyLayouts]:
    """The figures of one refit.

    Args:
        specs: The model's tensors in stream order.
        shards: What each rollout rank keeps.
        table: Who sends to whom.
        sites: On which hosts the workers are.
        bucket_bytes: Size of one bucket.
        links: How fast bytes move.
    """
    model = measure_stream(specs, bucket_bytes)
    if not is_successful(model):
        return Failure(model.failure())
    sent = _sent(specs, shards)
    if not is_successful(sent):
        return Failure(sent.failure())
    uncovered = check_coverage(specs, shards.layouts)
    if uncovered is not None:
        return Failure(uncovered)
    streams = _streams(shards, table, bucket_bytes)
    if isinstance(streams, TooManyLayouts):
        return Failure(streams)
    measured = _measured(specs, shards, sent.unwrap(), streams)
    if not is_successful(measured):
        return Failure(measured.failure())
    sizes = measured.unwrap()
    engines = [_engine(route, sites) for route in table.routes]
    seconds = _seconds([size.stream for size in sizes], table, engines, links)
    sent_by, policy = _sent_by(table, sizes), map(PolicyWorker, range(table.train_world_size))
    placed = zip(table.routes, shards.shard_of_rank, streams, sizes, strict=True)
    along = zip(placed, table.origins, engines, seconds, strict=True)
    routes = tuple(_route(*each, origin, engine, done) for each, origin, engine, done in along)
    with_buffers = table.train_world_size - len(table.idle_policy_ranks) + engines.count("nixl")
    return Success(
        RefitEstimate(
            parameters_bytes=model.unwrap().payload_bytes,
            tensors=len(specs),
            bucket_bytes=bucket_bytes,
            reserved_bytes_per_worker=BUCKETS_PER_WORKER * bucket_bytes,
            reserved_bytes=with_buffers * BUCKETS_PER_WORKER * bucket_bytes,
            assembly_bytes_per_receiver=max(map(_assembly_bytes, streams, sizes)),
            largest=_largest(specs, bucket_bytes),
            sent_bytes=sum(sent_by.values()),
            sent_bytes_by_policy_rank=tuple(sent_by.get(each, 0) for each in policy),
            most_sent_bytes=max(sent_by.values()),
            seconds=max(seconds),
            idle_policy_ranks=table.idle_policy_ranks,
            routes=routes,
        )
    )


def _route(
    route: Route,
    shard: int,
    stream: _Stream,
    size: _Size,
    origin: int,
    engine: Engine,
    seconds: float,
) -> RouteEstimate:
    return RouteEstimate(
        rollout_rank=route.receiver.rank,
        sender="policy" if isinstance(route.sender, PolicyWorker) else "rollout",
        sender_rank=route.sender.rank,
        policy_rank=origin,
        shard=shard,
        engine=engine,
        tensors=size.tensors,
        parts=size.parts,
        sent_whole=stream.shard is None,
        payload_bytes=size.stream.payload_bytes,
        padding_bytes=size.stream.moved_bytes - size.stream.payload_bytes,
        bucket_bytes=stream.bucket_bytes,
        buckets=size.stream.buckets,
        last_bucket_bytes=size.stream.last_bucket_bytes,
        seconds=seconds,
    )


def _sent(
    specs: Sequence[TensorSpec], shards: Shards
) -> Result[tuple[SentBytes, ...], LayoutError]:
    ranks = [shards.shard_of_rank.index(shard) for shard in range(len(shards.layouts))]
    return sent_bytes(specs, zip(ranks, shards.layouts, strict=True))


def _streams(
    shards: Shards, table: RoutingTable, bucket_bytes: int
) -> list[_Stream] | TooManyLayouts:
    """For each rollout rank, what it is sent.

    A chain of relays is sent one stream: the layout that all of it keep, or whole tensors.
    """
    heads = table.heads
    kept: dict[int, set[int]] = {}
    for rank, head in enumerate(heads):
        kept.setdefault(head, set()).add(shards.shard_of_rank[rank])
    shard_of_head = {head: own.pop() if len(own) == 1 else None for head, own in kept.items()}
    heads_of: dict[int, list[int]] = {}
    for head in shard_of_head:
        heads_of.setdefault(table.routes[head].sender.rank, []).append(head)
    stream_of_head: dict[int, _Stream] = {}
    for own in heads_of.values():
        layouts = [None if (s := shard_of_head[head]) is None else str(s) for head in own]
        shared = share_buffers(layouts, bucket_bytes, BUCKETS_PER_WORKER)
        if not is_successful(shared):
            return shared.failure()
        for share in shared.unwrap():
            for index in share.receivers:
                head = own[index]
                stream_of_head[head] = _Stream(shard_of_head[head], share.bucket_bytes)
    return [stream_of_head[head] for head in heads]


def _measured(
    specs: Sequence[TensorSpec],
    shards: Shards,
    sent: Sequence[SentBytes],
    streams: Sequence[_Stream],
) -> Result[list[_Size], PlanError | LayoutError]:
    """How large each stream is. It is planned once for all layouts that are sent alike."""
    sizes: dict[_Stream, _Size] = {}
    size_of: dict[tuple[SentBytes | None, int], _Size] = {}
    for stream in dict.fromkeys(streams):
        alike = None if stream.shard is None else sent[stream.shard]
        size = size_of.get((alike, stream.bucket_bytes))
        if size is None:
            planned = _sent_specs(specs, shards, stream.shard)
            if not is_successful(planned):
                return Failure(planned.failure())
            measured = measure_stream(planned.unwrap(), stream.bucket_bytes)
            if not is_successful(measured):
                return Failure(measured.failure())
            tensors = len(specs) if alike is None else len(alike)
            size = _Size(tensors, len(planned.unwrap()), measured.unwrap())
            size_of[alike, stream.bucket_bytes] = size
        sizes[stream] = size
    return Success([sizes[stream] for stream in streams])


def _sent_specs(
    specs: Sequence[TensorSpec], shards: Shards, shard: int | None
) -> Result[tuple[TensorSpec, ...], LayoutError]:
    if shard is None:
        return Success(tuple(specs))
    layout: Sequence[Part] = shards.layouts[shard]
    parts = plan_parts(specs, layout, rank=shards.shard_of_rank.index(shard))
    if not is_successful(parts):
        return Failure(parts.failure())
    return Success(tuple(part.spec for part in parts.unwrap()))


def _largest(specs: Sequence[TensorSpec], bucket_bytes: int) -> LargestTensor | None:
    if not specs:
        return None
    spec = max(specs, key=lambda each: each.tensor_bytes)
    return LargestTensor(
        name=spec.name, tensor_bytes=spec.tensor_bytes, buckets=spec.tensor_bytes / bucket_bytes
    )


def _assembly_bytes(stream: _Stream, size: _Size) -> int:
    ring = Ring(bucket_bytes=stream.bucket_bytes, buckets=BUCKETS_PER_WORKER, mirrored=True)
    largest = size.stream.largest_bytes
    return 0 if ring.holds(0, largest) else largest


def _sent_by(table: RoutingTable, sizes: Sequence[_Size]) -> dict[Worker, int]:
    """What each worker that sends does send, in bytes."""
    sent: dict[Worker, int] = {}
    for route, size in zip(table.routes, sizes, strict=True):
        sent[route.sender] = sent.get(route.sender, 0) + size.stream.moved_bytes
    return sent


def _engine(route: Route, sites: Sites) -> Engine:
    sender, receiver = route.sender, route.receiver
    hosts = sites.policy_hosts if isinstance(sender, PolicyWorker) else sites.rollout_hosts
    return choose_engine(route, hosts[sender.rank], sites.rollout_hosts[receiver.rank]).engine


def _seconds(
    sizes: Sequence[StreamSize], table: RoutingTable, engines: Sequence[Engine], links: Links
) -> list[float]:
    """For each rollout rank, whose stream is at its index, when it has everything."""
    speed_of: dict[Engine, float] = {"shm": links.inside_host, "nixl": links.between_hosts}
    busy: dict[tuple[Worker, Engine], float] = {}
    for route, engine, size in zip(table.routes, engines, sizes, strict=True):
        link = (route.sender, engine)
        busy[link] = busy.get(link, 0.0) + size.moved_bytes / speed_of[engine]
    seconds: list[float] = []
    for route, engine, size in zip(table.routes, engines, sizes, strict=True):
        done = busy[route.sender, engine]
        # A relay has a lower rank than whom it relays to, so its time is known.
        if not isinstance(route.sender, PolicyWorker):
            one_bucket = size.fullest_bucket_bytes / speed_of[engine]
            done = max(done, seconds[route.sender.rank] + one_bucket)
        seconds.append(done)
    return seconds
