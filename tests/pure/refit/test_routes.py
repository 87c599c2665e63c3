"""The routing table, for all pairs of worlds up to six by six and all placements on hosts."""

from __future__ import annotations

from itertools import product

import pytest

from rollsync.pure.refit import (
    EngineChoice,
    PolicyWorker,
    RolloutWorker,
    Route,
    RoutingTable,
    Sites,
    choose_engine,
    describe,
    plan_routes,
)
from rollsync.pure.refit.errors import EmptyWorld, SitesIncomplete
from rollsync.pure.refit.routes import choices_among

WORLDS = list(product(range(1, 7), range(1, 7)))


def check_rules(table: RoutingTable) -> None:
    """What holds for every table: one sender each, leading to the policy; even shares."""
    rollout = range(table.rollout_world_size)
    assert [route.receiver.rank for route in table.routes] == list(rollout)
    shares = [0] * table.train_world_size
    for rank in rollout:
        path = table.path_to(rank)  # Would not end if there were a cycle.
        assert isinstance(path[0], PolicyWorker)
        assert len(set(path)) == len(path) <= table.rollout_world_size
        assert RolloutWorker(rank) not in path
        shares[path[0].rank] += 1
        assert rank in table.receivers_of(table.sender_to(rank))
        assert table.origins[rank] == path[0].rank
        assert table.heads[rank] == (path[1].rank if path[1:] else rank)
    fed = [share for share in shares if share]
    check_extra_waits(table)
    starting = [table.routes_of(rank) for rank in range(table.train_world_size)]
    assert [len(routes) for routes in starting] == shares
    assert {route for routes in starting for route in routes} == set(table.routes)
    relays = [route for route in table.routes if isinstance(route.sender, RolloutWorker)]
    assert table.has_relays == bool(relays)
    assert max(fed) - min(fed) <= 1
    assert len(fed) == min(table.train_world_size, table.rollout_world_size)
    assert table.idle_policy_ranks == tuple(i for i, share in enumerate(shares) if not share)


def check_extra_waits(table: RoutingTable) -> None:
    """Of all who wait along a path, the one next to a worker that is stuck gives up first."""
    for rank in range(table.rollout_world_size):
        path = [*table.path_to(rank), RolloutWorker(rank)]
        chain = [worker.rank for worker in path[1:]]
        with_receivers = [table.extra_waits_for_receiver(each) for each in chain]
        with_senders = [table.extra_waits_for_sender(each) for each in chain]
        assert with_receivers == sorted(set(with_receivers), reverse=True)
        assert with_senders == sorted(set(with_senders))
        # A worker that waits for its receiver is waited for by it too, and gives up first.
        assert min(with_senders) > max(with_receivers) or not table.has_relays
        assert table.has_relays or with_senders == with_receivers == [0]


@pytest.mark.parametrize(("train", "rollout"), WORLDS)
def test_without_sites_every_policy_worker_sends_itself(train: int, rollout: int) -> None:
    table = plan_routes(train, rollout).unwrap()
    check_rules(table)
    assert all(isinstance(route.sender, PolicyWorker) for route in table.routes)
    if train >= rollout:
        assert all(table.sender_to(rank) == PolicyWorker(rank) for rank in range(rollout))
        assert table.idle_policy_ranks == tuple(range(rollout, train))
    feeders = [len(table.path_to(rank)) for rank in range(rollout)]
    assert feeders == [1] * rollout


@pytest.mark.parametrize(("train", "rollout"), WORLDS)
def test_with_sites_no_link_between_hosts_is_crossed_twice(train: int, rollout: int) -> None:
    hosts = ("a", "b", "c")
    for policy_hosts in product(hosts[:2], repeat=min(train, 2)):
        where_policy = (policy_hosts * 3)[:train]
        for where_rollout in product(hosts, repeat=rollout):
            sites = Sites(policy_hosts=where_policy, rollout_hosts=where_rollout)
            table = plan_routes(train, rollout, sites).unwrap()
            check_rules(table)
            entered: list[tuple[int, str]] = []
            for route in table.routes:
                rank = route.receiver.rank
                sender = route.sender
                is_policy = isinstance(sender, PolicyWorker)
                sender_host = (where_policy if is_policy else where_rollout)[sender.rank]
                origin = table.path_to(rank)[0].rank
                if sender_host != where_rollout[rank]:
                    entered.append((origin, where_rollout[rank]))
                elif where_policy[origin] == where_rollout[rank]:
                    assert is_policy, "who is on the policy worker's host reads from it"
            assert len(set(entered)) == len(entered)


@pytest.mark.parametrize(("train", "rollout"), [(1, 6), (2, 6), (3, 5), (1, 4)])
def test_the_policy_crosses_to_other_hosts_once_per_shard(train: int, rollout: int) -> None:
    for shard_count in (1, 2, 3):
        shards = tuple(rank % shard_count for rank in range(rollout))
        for where in product("abc", repeat=rollout):
            sites = Sites(policy_hosts=("p",) * train, rollout_hosts=where, rollout_shards=shards)
            table = plan_routes(train, rollout, sites).unwrap()
            check_rules(table)
            for rank in range(train):
                sent = table.receivers_of(PolicyWorker(rank))
                assert len({shards[r] for r in sent}) == len(sent)
            for route in table.routes:
                if isinstance(route.sender, RolloutWorker):
                    assert shards[route.sender.rank] == shards[route.receiver.rank]


def test_hosts_relay_in_a_chain_and_each_to_its_own_workers() -> None:
    sites = Sites(policy_hosts=("p",), rollout_hosts=("p", "a", "a", "b", "b", "c"))
    table = plan_routes(1, 6, sites).unwrap()
    assert [route.sender for route in table.routes] == [
        PolicyWorker(0),
        PolicyWorker(0),
        RolloutWorker(1),
        RolloutWorker(1),
        RolloutWorker(3),
        RolloutWorker(3),
    ]
    assert table.path_to(5) == (PolicyWorker(0), RolloutWorker(1), RolloutWorker(3))


def test_shares_are_neighbours() -> None:
    table = plan_routes(2, 5).unwrap()
    assert table.receivers_of(PolicyWorker(0)) == (0, 1, 2)
    assert table.receivers_of(PolicyWorker(1)) == (3, 4)


@pytest.mark.parametrize("size", [0, -1])
def test_a_side_without_workers_is_refused(size: int) -> None:
    assert plan_routes(size, 1).failure() == EmptyWorld(side="policy", world_size=size)
    assert plan_routes(1, size).failure() == EmptyWorld(side="rollout", world_size=size)
    assert "at least one" in describe(plan_routes(1, size).failure())


def test_sites_are_given_for_every_worker_or_not_at_all() -> None:
    short = Sites(policy_hosts=("a",), rollout_hosts=("a", "a"))
    assert plan_routes(2, 2, short).failure() == SitesIncomplete(
        side="policy", world_size=2, given=1
    )
    assert plan_routes(1, 3, short).failure() == SitesIncomplete(
        side="rollout", world_size=3, given=2
    )
    empty = Sites(policy_hosts=("a",), rollout_hosts=())
    assert plan_routes(1, 1, empty).failure() == SitesIncomplete(
        side="rollout", world_size=1, given=0
    )
    shards = Sites(policy_hosts=("a",), rollout_hosts=("a", "a"), rollout_shards=(0,))
    error = plan_routes(1, 2, shards).failure()
    assert error == SitesIncomplete(side="rollout", world_size=2, given=1)
    assert "1 of 2 rollout" in describe(error)


def test_the_engine_of_a_route_depends_on_whether_it_leaves_the_host() -> None:
    fed = Route(PolicyWorker(0), RolloutWorker(2))
    inside = choose_engine(fed, "a", "a")
    assert (inside.route, inside.engine) == (fed, "shm")
    assert str(inside) == "policy 0 to rollout 2 by shm: both are on host a"
    relayed = Route(RolloutWorker(1), RolloutWorker(2))
    between = choose_engine(relayed, "a", "b")
    assert (between.route, between.engine) == (relayed, "nixl")
    assert str(between) == (
        "rollout 1 to rollout 2 by nixl: the sender is on host a, the receiver on b"
    )


def test_what_carries_each_route_is_told_in_the_order_of_the_rollout_ranks() -> None:
    def choice(rank: int) -> EngineChoice:
        route = Route(sender=PolicyWorker(0), receiver=RolloutWorker(rank))
        return EngineChoice(route=route, engine="shm", reason="it is on the same host")

    answers = [(choice(2), choice(0)), None, (), "ready", (choice(1),), [choice(3)], ("x",)]
    assert choices_among(answers) == (choice(0), choice(1), choice(2))
