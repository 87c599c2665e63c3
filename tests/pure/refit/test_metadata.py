"""The order of the workers' metadata, for every order in which the answers can come."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import (
    Topology,
    describe,
    flatten_metadata,
    ordered_generation_metadata,
    plan_topology,
    rollout_rank,
    sort_ranked_metadata,
)
from rollsync.pure.refit.errors import (
    EnginesUneven,
    GroupSizesDiffer,
    MetadataError,
    RankBeyondWorld,
    RankGap,
    RankMissing,
    RankNotAnInteger,
    RankRepeated,
    WorldSizeDiffers,
)
from rollsync.pure.refit.metadata import rank_prefixes, topology_of_answers


def item(rank: object, group: int = 0) -> dict[str, object]:
    return {"rank": rank, "address": f"{group}/{rank}"}


def policy(world_size: int) -> list[dict[str, object]]:
    return [item(rank) for rank in range(world_size)]


def refused(
    generation: list[object], rollout_world_size: int, policy_results: list[object] | None = None
) -> MetadataError:
    results = [policy(1)] if policy_results is None else policy_results
    return plan_topology(
        results, generation, train_world_size=1, rollout_world_size=rollout_world_size
    ).failure()


@pytest.mark.parametrize("groups", range(1, 7))
@pytest.mark.parametrize("group_size", range(1, 7))
def test_global_order_is_group_by_group_whatever_order_a_group_answers_in(
    groups: int, group_size: int
) -> None:
    expected = [item(rank, group) for group in range(groups) for rank in range(group_size)]
    for order in permutations(range(group_size)):
        # Each group answers in another order than the one before it.
        results = [
            [item(order[(i + group) % group_size], group) for i in range(group_size)]
            for group in range(groups)
        ]
        assert ordered_generation_metadata(results) == expected
        topology = plan_topology(
            [policy(2)], results, train_world_size=2, rollout_world_size=groups * group_size
        ).unwrap()
        assert topology.metadata == (*policy(2), *expected)


def test_every_combination_of_orders_in_two_groups_of_three() -> None:
    for first, second in product(permutations(range(3)), repeat=2):
        results = [[item(r, 0) for r in first], [item(r, 1) for r in second]]
        assert ordered_generation_metadata(results) == [
            item(rank, group) for group in (0, 1) for rank in (0, 1, 2)
        ]


def test_an_answer_that_is_no_list_is_a_group_of_one() -> None:
    results: list[object] = [item(0, 0), [item(0, 1)], item(0, 2)]
    assert ordered_generation_metadata(results) == [item(0, 0), item(0, 1), item(0, 2)]
    assert flatten_metadata(results) == [item(0, 0), item(0, 1), item(0, 2)]


def test_a_tuple_is_one_item_which_only_its_engine_can_read() -> None:
    address = ("host", 1)
    assert flatten_metadata([address, [address]]) == [address, address]
    topology = topology_of_answers([address], [address, address], rollout_workers=2).unwrap()
    assert topology == Topology(
        metadata=(address, address, address), train_world_size=1, rollout_world_size=2
    )


@pytest.mark.parametrize("world_size", range(1, 7))
def test_policy_answers_are_sorted_whatever_order_they_come_in(world_size: int) -> None:
    for order in permutations(range(world_size)):
        results: list[object] = [[item(rank)] if rank % 2 else item(rank) for rank in order]
        topology = plan_topology(
            results, [item(0, 7)], train_world_size=world_size, rollout_world_size=1
        ).unwrap()
        assert topology == Topology(
            metadata=(*policy(world_size), item(0, 7)),
            train_world_size=world_size,
            rollout_world_size=1,
        )


@given(st.lists(st.lists(st.integers() | st.text() | st.none(), max_size=4), max_size=4))
def test_items_without_a_rank_keep_their_order(results: list[list[object]]) -> None:
    flat = [entry for group in results for entry in group]
    assert ordered_generation_metadata(results) == flat
    assert flatten_metadata(results) == flat
    assert sort_ranked_metadata(flat) == flat


@given(st.lists(st.integers(-3, 20)))
def test_sorting_by_rank_is_stable_and_loses_nothing(ranks: list[int]) -> None:
    metadata = [{"rank": rank, "position": i} for i, rank in enumerate(ranks)]
    assert sort_ranked_metadata(metadata) == sorted(metadata, key=lambda entry: entry["rank"])


def test_one_item_without_a_usable_rank_leaves_all_where_they_are() -> None:
    for odd in ({"address": "x"}, "x", item(None), item("0"), item(True), item(1.0)):
        metadata: list[object] = [item(2), odd, item(0)]
        assert sort_ranked_metadata(metadata) == metadata


def test_ranks_that_are_global_already_are_accepted() -> None:
    results = [[item(1, 0), item(0, 0)], [item(2, 1), item(3, 1)]]
    topology = plan_topology([policy(1)], results, train_world_size=1, rollout_world_size=4)
    assert topology.unwrap().metadata[1:] == (item(0, 0), item(1, 0), item(2, 1), item(3, 1))


def test_metadata_without_ranks_is_taken_in_worker_order() -> None:
    topology = plan_topology(["p0", "p1"], [["a", "b"]], train_world_size=2, rollout_world_size=2)
    assert topology.unwrap().metadata == ("p0", "p1", "a", "b")


@pytest.mark.parametrize(
    ("generation", "world_size", "error"),
    [
        (
            [[item(0), item(1)], [item(0), item(0)]],
            4,
            RankRepeated(side="rollout", group=1, rank=0),
        ),
        (
            [[item(0), item(1)], [item(0), item(2)]],
            4,
            RankGap(side="rollout", group=1, rank=1, group_size=2),
        ),
        (
            [[item(2), item(3)], [item(0), item(1)]],
            4,
            RankGap(side="rollout", group=0, rank=0, group_size=2),
        ),
        ([[item(-1), item(0)]], 2, RankGap(side="rollout", group=0, rank=1, group_size=2)),
        (
            [[item(0), item(1)], [item(0)]],
            3,
            GroupSizesDiffer(group=1, group_size=1, first_group_size=2),
        ),
        ([[item(0)], []], 1, GroupSizesDiffer(group=1, group_size=0, first_group_size=1)),
        ([[item(0), item(1)]], 3, WorldSizeDiffers(side="rollout", declared=3, answered=2)),
        ([[item(0), item(1)]], 1, WorldSizeDiffers(side="rollout", declared=1, answered=2)),
        ([], 1, WorldSizeDiffers(side="rollout", declared=1, answered=0)),
        ([[item(0), {"a": 1}]], 2, RankMissing(side="rollout", group=0, position=1)),
        (
            [[item(0), item("1")]],
            2,
            RankNotAnInteger(side="rollout", group=0, position=1, rank="'1'"),
        ),
        (
            [[item(True), item(0)]],
            2,
            RankNotAnInteger(side="rollout", group=0, position=0, rank="True"),
        ),
    ],
)
def test_each_violation_of_a_group_is_an_error_of_its_own(
    generation: list[object], world_size: int, error: MetadataError
) -> None:
    assert refused(generation, world_size) == error


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([item(0), item(0)], RankRepeated(side="policy", group=0, rank=0)),
        ([item(1)], RankGap(side="policy", group=0, rank=0, group_size=1)),
        ([item(0), item(1)], WorldSizeDiffers(side="policy", declared=1, answered=2)),
        ([], WorldSizeDiffers(side="policy", declared=1, answered=0)),
        ([item(0), "x"], RankMissing(side="policy", group=0, position=1)),
    ],
)
def test_each_violation_of_the_policy_is_an_error_of_its_own(
    answers: list[object], error: MetadataError
) -> None:
    assert refused([item(0)], 1, answers) == error
    assert "group" not in describe(error)


def test_messages_name_the_group_and_the_rank() -> None:
    error = refused([[item(0), item(1)], [item(0), item(2)]], 4)
    assert "group 1" in describe(error)
    assert "rank 1" in describe(error)
    assert "3 rollout workers" in describe(refused([[item(r) for r in range(3)]], 4))


@pytest.mark.parametrize("groups", range(1, 7))
@pytest.mark.parametrize("group_size", range(1, 7))
def test_rollout_ranks_number_all_workers_once(groups: int, group_size: int) -> None:
    world_size = groups * group_size
    ranks = [
        rollout_rank(
            rank_prefix=group * group_size,
            local_rank=local,
            engine_world_size=group_size,
            rollout_world_size=world_size,
        ).unwrap()
        for group in range(groups)
        for local in range(group_size)
    ]
    assert ranks == list(range(world_size))


def test_a_process_group_that_spans_all_groups_numbers_globally() -> None:
    rank = rollout_rank(rank_prefix=2, local_rank=3, engine_world_size=4, rollout_world_size=4)
    assert rank.unwrap() == 3


@pytest.mark.parametrize(("prefix", "local"), [(4, 0), (2, 2), (0, -1)])
def test_a_rank_that_the_world_has_no_place_for_is_refused(prefix: int, local: int) -> None:
    error = rollout_rank(
        rank_prefix=prefix, local_rank=local, engine_world_size=2, rollout_world_size=4
    ).failure()
    assert error == RankBeyondWorld(rank=prefix + local, world_size=4)
    assert "world of 4" in describe(error)


def test_engines_have_equally_many_workers_or_are_refused() -> None:
    for workers, engines in product(range(-1, 13), repeat=2):
        prefixes = rank_prefixes(rollout_workers=workers, engines=engines)
        if engines < 1 or workers < 1 or workers % engines:
            error = EnginesUneven(rollout_workers=workers, engines=engines)
            assert prefixes.failure() == error
            assert f"{workers} rollout workers cannot be shared evenly" in describe(error)
        else:
            size = workers // engines
            assert list(prefixes.unwrap()) == [size * engine for engine in range(engines)]


def test_who_should_have_answered_is_known_only_where_there_are_ranks() -> None:
    policy, ranked = [{"rank": 0}], [[{"rank": 0}], [{"rank": 0}]]
    opaque = topology_of_answers(policy, ["a", ["b"]], rollout_workers=3).unwrap()
    assert (opaque.train_world_size, opaque.rollout_world_size) == (1, 2)
    assert opaque.metadata == ({"rank": 0}, "a", "b")
    error = topology_of_answers(policy, ranked, rollout_workers=3).failure()
    assert error == WorldSizeDiffers(side="rollout", declared=3, answered=2)
