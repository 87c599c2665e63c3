"""What can be placed is placed, and what cannot is named with what is there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollsync.pure.config import (
    ClusterConfig,
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    MasterConfig,
    ModelConfig,
    RunConfig,
    TransferQueuePlaneConfig,
    WorkerResources,
)
from rollsync.pure.placement import (
    ClusterNode,
    WorkerNeed,
    cpus_missing_for_queue,
    describe_needs,
    describe_nodes,
    local_cpus,
    missing_for_queue,
    missing_for_workers,
    places_near_policy,
    queue_cpus,
    worker_needs,
    workers_by_host,
)
from rollsync.pure.refit import plan_routes
from rollsync.pure.rollout.sampler import InOrderSampler

CONFIG = MasterConfig(
    run=RunConfig(directory="run"),
    data=DataConfig(task="chain_sum", size=8),
    model=ModelConfig(path="model"),
    grpo=GrpoConfig(
        num_prompts_per_step=2, num_generations_per_prompt=2, max_steps=1, learning_rate=1e-3
    ),
    generation=GenerationConfig(backend="torch", max_new_tokens=4, engines=3),
    sampler=InOrderSampler(),
)


def node(name: str, cpus: float, free: float | None = None, **more: float) -> ClusterNode:
    total = {"CPU": cpus, **more} if cpus else dict(more)
    return ClusterNode(
        node_id=name,
        host=name[0],
        total=total,
        available=total if free is None else {**total, "CPU": free},
    )


def need(**resources: float) -> WorkerNeed:
    return WorkerNeed(role="worker", resources=resources)


def test_a_run_needs_one_policy_worker_and_its_engines() -> None:
    cluster = ClusterConfig(
        policy_worker=WorkerResources(gpus=1),
        generation_engine=WorkerResources(cpus=0, gpus=0.5, custom={"fast": 1}),
    )
    needs = worker_needs(replace(CONFIG, cluster=cluster))
    assert describe_needs(needs) == (
        "1 policy worker (1 CPU, 1 GPU), 3 generation engines (0.5 GPU, 1 fast each)"
    )


def test_policy_workers_come_before_the_engines() -> None:
    grpo = replace(CONFIG.grpo, data_parallel_size=2)
    needs = worker_needs(replace(CONFIG, grpo=grpo))
    assert [need.role for need in needs] == ["policy worker"] * 2 + ["generation engine"] * 3
    assert local_cpus(replace(CONFIG, grpo=grpo), machine_cpus=2) == 5


def test_a_ray_of_the_runs_own_declares_what_the_run_counts() -> None:
    assert local_cpus(CONFIG, machine_cpus=2) == 4
    assert local_cpus(CONFIG, machine_cpus=64) == 64
    queue = TransferQueuePlaneConfig(storage_units=3)
    assert local_cpus(replace(CONFIG, data_plane=queue), machine_cpus=2) == 8
    assert queue_cpus(TransferQueuePlaneConfig(storage="ray")) == 1


def test_what_no_node_has_is_missing() -> None:
    nodes = [node("a", 4), node("b", 4, GPU=1)]
    assert missing_for_workers([need(CPU=4), need(CPU=1, GPU=1)], nodes, strategy="pack") == ()
    assert missing_for_workers([need(CPU=5)], nodes, strategy="pack") == (
        "no node has 5 CPU for a worker",
    )
    assert missing_for_workers([need(GPU=1), need(GPU=1)], nodes, strategy="pack") == (
        "2 GPU needed in all, the cluster has 1",
    )
    assert missing_for_workers([need(CPU=3), need(CPU=3)], nodes, strategy="strict_pack") == (
        "no node has 6 CPU, for strict_pack",
    )
    assert missing_for_workers([need(CPU=1)] * 3, nodes, strategy="strict_spread") == (
        "3 workers for 2 nodes, for strict_spread",
    )


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from(["pack", "strict_pack", "strict_spread"]),
)
def test_what_is_called_missing_cannot_be_placed(
    wanted: list[int], there: list[int], strategy: str
) -> None:
    """Compared with trying every placement: nothing that works is refused."""
    needs = [need(CPU=cpus) for cpus in wanted]
    nodes = [node(str(index), cpus) for index, cpus in enumerate(there)]
    if _fits(wanted, there, strategy):
        assert missing_for_workers(needs, nodes, strategy=strategy) == ()


def _fits(wanted: list[int], free: list[int], strategy: str) -> bool:
    if strategy == "strict_pack":
        return any(sum(wanted) <= cpus for cpus in free)
    if not wanted:
        return True
    for index, cpus in enumerate(free):
        if wanted[0] <= cpus:
            after = 0 if strategy == "strict_spread" else cpus - wanted[0]
            if _fits(wanted[1:], [*free[:index], after, *free[index + 1 :]], strategy):
                return True
    return False


def test_a_queue_needs_a_cpu_for_each_unit_where_it_is_dealt() -> None:
    plane = TransferQueuePlaneConfig(storage_units=3)
    assert missing_for_queue(plane, [node("a", 2), node("b", 2)]) == ()
    assert missing_for_queue(plane, [node("b", 2), node("a", 4, free=1)]) == (
        "node a has 1 free CPUs for 2 storage units",
    )
    assert missing_for_queue(plane, [node("a", 3)]) == (
        "no node has a free CPU for the queue's controller",
    )
    chosen = TransferQueuePlaneConfig(storage_units=2, node_resource="rows")
    assert missing_for_queue(chosen, [node("a", 1), node("b", 2, rows=1)]) == ()
    assert missing_for_queue(chosen, [node("a", 9)]) == (
        "no node has the resource rows (data_plane.node_resource)",
    )
    objects = TransferQueuePlaneConfig(storage="ray", storage_units=9)
    assert missing_for_queue(objects, [node("a", 1)]) == ()


@pytest.mark.parametrize(
    ("free_now", "missing"),
    [
        pytest.param([0, 0], 0, id="all five are taken, by the queue"),
        pytest.param([2, 1], 0, id="two are taken, and what it waits for is free"),
        pytest.param([5, 0], 0, id="none is taken yet, and five are free"),
    ],
)
def test_cpus_that_a_queue_has_or_could_have_are_not_missing(
    free_now: list[float], missing: float
) -> None:
    assert _missing_of_five([5, 0], free_now) == missing


@pytest.mark.parametrize(
    ("free_before", "free_now", "missing"),
    [([4, 0], [0, 0], 1), ([2, 2], [1, 0], 1), ([1, 0], [1, 0], 4), ([0, 0], [3, 0], 2)],
)
def test_cpus_that_a_queue_waits_for_and_nobody_gives_back_are_missing(
    free_before: list[float], free_now: list[float], missing: float
) -> None:
    assert _missing_of_five(free_before, free_now) == missing


def _missing_of_five(free_before: list[float], free_now: list[float]) -> float:
    """Of the five CPUs that four units and a controller reserve."""
    before, now = (
        [node(name, 8, free) for name, free in zip("ab", frees, strict=True)]
        for frees in (free_before, free_now)
    )
    return cpus_missing_for_queue(TransferQueuePlaneConfig(storage_units=4), before, now)


def test_workers_share_the_memory_of_their_host() -> None:
    nodes = [node("a1", 1), node("a2", 1), node("b1", 1)]
    assert workers_by_host(["a1", "b1", "a2", "a1"], nodes) == (3, 1, 3, 3)


@given(
    st.lists(st.sampled_from(["a1", "a2", "b1", "c1"]), min_size=1, max_size=4),
    st.lists(st.sampled_from(["a1", "a2", "b1", "c1"]), min_size=1, max_size=5),
)
def test_no_other_order_of_the_engines_keeps_more_routes_near(
    policy: list[str], places: list[str]
) -> None:
    feeders = [
        policy[route.sender.rank] for route in plan_routes(len(policy), len(places)).unwrap().routes
    ]

    def near(order: Sequence[int]) -> tuple[int, int]:
        routes = [(feeder, places[place]) for feeder, place in zip(feeders, order, strict=True)]
        return (
            sum(one == other for one, other in routes),
            sum(one[0] == other[0] for one, other in routes),
        )

    chosen = places_near_policy([node(n, 1) for n in policy], [node(n, 1) for n in places])
    assert near(chosen) == max(near(order) for order in permutations(range(len(places))))
    assert sorted(chosen) == list(range(len(places)))


def test_an_engine_is_moved_only_to_be_nearer() -> None:
    a, b, c = (node(name, 1) for name in ("a", "b", "c"))
    assert places_near_policy([a, b], [a, c, b]) == (0, 1, 2)
    assert places_near_policy([a, b], [b, c, a]) == (2, 1, 0)
    assert places_near_policy([a], [b, c]) == (0, 1)


def test_nodes_are_described_by_what_is_free() -> None:
    assert describe_nodes([node("a1", 4, free=1), node("b1", 0, rows=1)]) == (
        "node a1 on a: 1 of 4 CPU free; node b1 on b: no CPU or GPU"
    )
