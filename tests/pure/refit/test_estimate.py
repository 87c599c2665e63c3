"""Figures of a refit: bytes that add up, and times that follow from the links."""

from __future__ import annotations

import pytest

from rollsync.pure.refit import MEBIBYTE, Sites, TensorSpec, plan_routes
from rollsync.pure.refit.errors import TensorNamedTwice, TensorNotCovered, UnknownTensor
from rollsync.pure.refit.estimate import LargestTensor, Links, RefitEstimate, estimate_refit
from rollsync.pure.refit.layout import Part, whole
from rollsync.pure.refit.model_shapes import attention_of, model_tensors
from rollsync.pure.refit.parallel import Parallelism, Shards, plan_shards, whole_model
from tests.pure.refit.published_models import LLAMA_3_1_70B, QWEN3_235B_A22B, PublishedModel

LINKS = Links(between_hosts=1024.0, inside_host=4096.0)
SPECS = [TensorSpec("a", (1024,), "int8"), TensorSpec("b", (100,), "int8")]


def estimated(train: int, sites: Sites, *, relays: bool = True) -> RefitEstimate:
    rollout = len(sites.rollout_hosts)
    table = plan_routes(train, rollout, sites if relays else None).unwrap()
    shards = whole_model(SPECS, rollout)
    result = estimate_refit(SPECS, shards, table, sites, bucket_bytes=512, links=LINKS)
    return result.unwrap()


def test_the_figures_of_one_route() -> None:
    estimate = estimated(1, Sites(policy_hosts=("p",), rollout_hosts=("r",)))
    assert (estimate.parameters_bytes, estimate.tensors) == (1124, 2)
    assert estimate.largest == LargestTensor(name="a", tensor_bytes=1024, buckets=2.0)
    assert (estimate.reserved_bytes_per_worker, estimate.reserved_bytes) == (1024, 2048)
    (route,) = estimate.routes
    assert (route.sender, route.sender_rank, route.policy_rank) == ("policy", 0, 0)
    assert (route.engine, route.tensors, route.shard) == ("nixl", 2, 0)
    assert (route.payload_bytes, route.padding_bytes) == (1124, 0)
    assert (route.buckets, route.last_bucket_bytes) == (3, 100)
    assert estimate.seconds == route.seconds == 1124 / 1024


def test_receivers_of_a_worker_share_its_link() -> None:
    sites = Sites(policy_hosts=("p",), rollout_hosts=("a", "b", "p"))
    estimate = estimated(1, sites, relays=False)
    assert [route.seconds for route in estimate.routes] == [
        2 * 1124 / 1024,
        2 * 1124 / 1024,
        1124 / 4096,
    ]
    assert [route.engine for route in estimate.routes] == ["nixl", "nixl", "shm"]
    assert estimate.sent_bytes == 3 * 1124


def test_a_relay_is_one_bucket_behind_whom_it_relays() -> None:
    sites = Sites(policy_hosts=("p",), rollout_hosts=("a", "a", "b"))
    estimate = estimated(1, sites)
    first = 1124 / 1024
    assert [route.seconds for route in estimate.routes] == [
        first,
        first + 512 / 4096,
        first + 512 / 1024,
    ]
    assert [route.sender for route in estimate.routes] == ["policy", "rollout", "rollout"]
    assert {route.policy_rank for route in estimate.routes} == {0}
    # The first of the relays has two behind it.
    assert (estimate.sent_bytes_by_policy_rank, estimate.most_sent_bytes) == ((1124,), 2 * 1124)
    slower = estimated(1, sites, relays=False)
    assert (slower.sent_bytes_by_policy_rank, slower.most_sent_bytes) == ((3 * 1124,), 3 * 1124)
    assert estimate.seconds < slower.seconds


def test_buckets_are_held_by_who_sends_and_who_reads_from_afar() -> None:
    estimate = estimated(3, Sites(policy_hosts=("p",) * 3, rollout_hosts=("r",)))
    assert estimate.idle_policy_ranks == (1, 2)
    assert estimate.reserved_bytes == 2 * 1024
    assert estimate.sent_bytes_by_policy_rank == (1124, 0, 0)
    on_its_host = estimated(1, Sites(policy_hosts=("p",), rollout_hosts=("p", "p", "r", "r")))
    assert [route.engine for route in on_its_host.routes] == ["shm", "shm", "nixl", "shm"]
    assert on_its_host.reserved_bytes == 2 * 1024


def test_a_model_without_tensors() -> None:
    table = plan_routes(1, 1).unwrap()
    sites = Sites(policy_hosts=("p",), rollout_hosts=("r",))
    estimate = estimate_refit(
        [], whole_model([], 1), table, sites, bucket_bytes=512, links=LINKS
    ).unwrap()
    assert estimate.largest is None
    assert (estimate.sent_bytes, estimate.seconds) == (0, 0.0)
    assert (estimate.routes[0].buckets, estimate.routes[0].last_bucket_bytes) == (0, 0)


def test_a_tensor_that_no_rank_keeps_is_refused() -> None:
    sites = Sites(policy_hosts=("p",), rollout_hosts=("r",))
    table = plan_routes(1, 1).unwrap()
    shards = Shards(layouts=((Part("a", whole(SPECS[0])),),), shard_of_rank=(0,))
    result = estimate_refit(SPECS, shards, table, sites, bucket_bytes=512, links=LINKS)
    assert result.failure() == TensorNotCovered(tensor="b", elements=100, held=0)


def test_what_cannot_be_planned_is_refused() -> None:
    table = plan_routes(1, 1).unwrap()
    sites = Sites(policy_hosts=("p",), rollout_hosts=("r",))
    stranger = Shards(layouts=((Part("x", whole(SPECS[0])),),), shard_of_rank=(0,))
    error = estimate_refit(SPECS, stranger, table, sites, bucket_bytes=512, links=LINKS).failure()
    assert error == UnknownTensor(rank=0, tensor="x")
    repeated = estimate_refit(
        [SPECS[0], SPECS[0]],
        Shards(layouts=((Part("a", whole(SPECS[0])),),), shard_of_rank=(0,)),
        table,
        sites,
        bucket_bytes=512,
        links=LINKS,
    )
    assert repeated.failure() == TensorNamedTwice(tensor="a", aliases=())


@pytest.mark.parametrize(
    ("model", "parallelism"),
    [
        (LLAMA_3_1_70B, Parallelism(rollout_world_size=16, tensor_parallel=8)),
        (
            LLAMA_3_1_70B,
            Parallelism(rollout_world_size=16, tensor_parallel=4, pipeline_parallel=2),
        ),
        (
            QWEN3_235B_A22B,
            Parallelism(rollout_world_size=16, tensor_parallel=4, expert_parallel=16),
        ),
    ],
)
def test_published_models_are_sent_once_to_every_engine(
    model: PublishedModel, parallelism: Parallelism
) -> None:
    specs = model_tensors(model.config).unwrap()
    shards = plan_shards(specs, parallelism, attention_of(model.config)).unwrap()
    world = parallelism.rollout_world_size
    sites = Sites(
        policy_hosts=tuple(f"p{r // 8}" for r in range(8)),
        rollout_hosts=tuple(f"r{r // 8}" for r in range(world)),
        rollout_shards=shards.shard_of_rank,
    )
    table = plan_routes(8, world, sites).unwrap()
    estimate = estimate_refit(
        specs,
        shards,
        table,
        sites,
        bucket_bytes=1638 * MEBIBYTE,
        links=Links(between_hosts=50e9, inside_host=50e9),
    ).unwrap()
    assert estimate.parameters_bytes == 2 * model.parameters
    payload = sum(route.payload_bytes for route in estimate.routes)
    if parallelism.expert_parallel > 1:
        # Experts once, everything else once to each of the four engines.
        experts = sum(spec.tensor_bytes for spec in specs if ".experts." in spec.name)
        once_to_each = 4 * (estimate.parameters_bytes - experts)
        assert 0 <= payload - experts - once_to_each < 0.01 * payload
    else:
        engines = world // (parallelism.tensor_parallel * parallelism.pipeline_parallel)
        assert 0 <= payload - engines * estimate.parameters_bytes < 0.001 * payload
    assert all(route.padding_bytes < 256 * route.tensors for route in estimate.routes)
