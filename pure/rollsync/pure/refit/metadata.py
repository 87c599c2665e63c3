"""The order of what the workers report, and the check that every worker reported once.

Each policy and rollout worker answers with metadata of its transfer endpoint: anything but a list,
usually a mapping with a `rank`. The engines connect by position in one list, so its order is agreed
here: policy workers by rank, then rollout workers group by group.

Rule kept here: a rank that a rollout worker reports is unique only inside its data-parallel group,
so it is never compared across groups. (An engine whose own process group spans all groups reports
global ranks; then every group's ranks follow those of the group before, and that is accepted.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.refit.errors import (
    EnginesUneven,
    GroupSizesDiffer,
    MetadataError,
    RankBeyondWorld,
    RankGap,
    RankMissing,
    RankNotAnInteger,
    RankRepeated,
    Side,
    WorldSizeDiffers,
)


class Topology(Struct, frozen=True, kw_only=True):
    """Every worker's metadata, in the order in which engines number their peers.

    Attributes:
        metadata: That of the policy workers by rank, then that of the rollout workers by rank.
        train_world_size: How many policy workers there are.
        rollout_world_size: How many rollout workers there are.
    """

    metadata: tuple[object, ...]
    train_world_size: int
    rollout_world_size: int


def flatten_metadata(results: Iterable[object]) -> list[object]:
    """The items of all results in order; a result is a list of items or a single one."""
    return [item for result in results for item in _as_group(result)]


def sort_ranked_metadata(metadata: Sequence[object]) -> list[object]:
    """The items by their `rank` when each has one, otherwise as they are."""
    ranks = [_rank_of(item) for item in metadata]
    known = [rank for rank in ranks if isinstance(rank, int)]
    if len(known) != len(ranks):
        return list(metadata)
    return [metadata[position] for position in sorted(range(len(known)), key=known.__getitem__)]


def ordered_generation_metadata(results: Iterable[object]) -> list[object]:
    """The rollout workers' items in the order of their global ranks.

    Args:
        results: One answer per data-parallel group, in worker-group order. Each is the list of
            the group's items in any order, or the one item of a group of one.
    """
    return [item for group in results for item in sort_ranked_metadata(_as_group(group))]


def plan_topology(
    policy_results: Iterable[object],
    generation_results: Iterable[object],
    *,
    train_world_size: int,
    rollout_world_size: int,
) -> Result[Topology, MetadataError]:
    """Orders the answers of both sides and checks that they are all there.

    Args:
        policy_results: Answers of the policy workers, in any order.
        generation_results: Answers of the data-parallel groups, in worker-group order.
        train_world_size: Declared number of policy workers.
        rollout_world_size: Declared number of rollout workers.
    """
    policy = sort_ranked_metadata(flatten_metadata(policy_results))
    error: MetadataError | None = _check_group("policy", 0, policy, 0)
    if error is None and len(policy) != train_world_size:
        error = WorldSizeDiffers(side="policy", declared=train_world_size, answered=len(policy))
    if error is not None:
        return Failure(error)
    generation = _ordered_groups(list(generation_results), rollout_world_size)
    if not is_successful(generation):
        return Failure(generation.failure())
    return Success(
        Topology(
            metadata=(*policy, *generation.unwrap()),
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
        )
    )


def topology_of_answers(
    policy: Sequence[object], generation: Sequence[object], *, rollout_workers: int
) -> Result[Topology, MetadataError]:
    """The topology of those who answered.

    Args:
        policy: Answers of the policy workers, all of which were asked.
        generation: Answers of the data-parallel groups, in worker-group order.
        rollout_workers: How many rollout workers should have answered. Metadata without ranks is
            opaque: then who answered is all there is to know.
    """
    answered = flatten_metadata(generation)
    ranked = any(_rank_of(item) is not None for item in answered)
    return plan_topology(
        policy,
        generation,
        train_world_size=len(flatten_metadata(policy)),
        rollout_world_size=rollout_workers if ranked else len(answered),
    )


def rank_prefixes(*, rollout_workers: int, engines: int) -> Result[range, EnginesUneven]:
    """How many rollout workers the engines before each one have, engine by engine."""
    if engines < 1 or rollout_workers < 1 or rollout_workers % engines:
        return Failure(EnginesUneven(rollout_workers=rollout_workers, engines=engines))
    return Success(range(0, rollout_workers, rollout_workers // engines))


def rollout_rank(
    *, rank_prefix: int, local_rank: int, engine_world_size: int, rollout_world_size: int
) -> Result[int, RankBeyondWorld]:
    """The rank of a rollout worker among all rollout workers.

    Args:
        rank_prefix: How many workers the data-parallel groups before its own have.
        local_rank: Its rank in its engine's process group.
        engine_world_size: Size of that process group. One that has all rollout workers spans all
            data-parallel groups, and its ranks are global already.
        rollout_world_size: How many rollout workers there are.
    """
    spans_all = engine_world_size == rollout_world_size
    rank = local_rank if spans_all else rank_prefix + local_rank
    if not 0 <= rank < rollout_world_size:
        return Failure(RankBeyondWorld(rank=rank, world_size=rollout_world_size))
    return Success(rank)


def _ordered_groups(
    results: Sequence[object], rollout_world_size: int
) -> Result[list[object], MetadataError]:
    groups = [sort_ranked_metadata(_as_group(result)) for result in results]
    size = len(groups[0]) if groups else 0
    for index, group in enumerate(groups):
        if len(group) != size:
            return Failure(
                GroupSizesDiffer(group=index, group_size=len(group), first_group_size=size)
            )
    ranks_are_global = all(
        _check_group("rollout", index, group, index * size) is None
        for index, group in enumerate(groups)
    )
    if not ranks_are_global:
        for index, group in enumerate(groups):
            error = _check_group("rollout", index, group, 0)
            if error is not None:
                return Failure(error)
    answered = size * len(groups)
    if answered != rollout_world_size:
        return Failure(
            WorldSizeDiffers(side="rollout", declared=rollout_world_size, answered=answered)
        )
    return Success([item for group in groups for item in group])


def _check_group(
    side: Side, index: int, group: Sequence[object], first_rank: int
) -> RankMissing | RankNotAnInteger | RankRepeated | RankGap | None:
    """What is wrong with a group whose ranks should be `first_rank` and following, if any."""
    found = [_rank_of(item) for item in group]
    if all(rank is None for rank in found):
        return None
    ranks: list[int] = []
    for position, rank in enumerate(found):
        if rank is None:
            return RankMissing(side=side, group=index, position=position)
        if isinstance(rank, _NotAnInteger):
            return RankNotAnInteger(side=side, group=index, position=position, rank=rank.shown)
        if rank in ranks:
            return RankRepeated(side=side, group=index, rank=rank)
        ranks.append(rank)
    for rank in range(first_rank, first_rank + len(ranks)):
        if rank not in ranks:
            return RankGap(side=side, group=index, rank=rank, group_size=len(ranks))
    return None


class _NotAnInteger(Struct, frozen=True):
    shown: str


def _rank_of(item: object) -> int | _NotAnInteger | None:
    if not isinstance(item, Mapping) or "rank" not in item:
        return None
    rank: object = item["rank"]
    if isinstance(rank, bool) or not isinstance(rank, Integral):
        return _NotAnInteger(repr(rank))
    return int(rank)


def _as_group(result: object) -> Sequence[object]:
    return result if isinstance(result, list) else [result]
