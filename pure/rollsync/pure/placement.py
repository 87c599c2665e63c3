"""Where a run's processes may be: what each of them needs, what the cluster has, who shares a host.

Rules kept here: what is called missing is certain, so that waiting for it would be in vain unless
nodes join; and every answer names what is needed and what there is, in the same units.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from rollsync.pure.config import MasterConfig, TransferQueuePlaneConfig, WorkerResources
from rollsync.pure.refit.routes import plan_routes

CPU, GPU = "CPU", "GPU"
"""What Ray calls them."""
Amounts = Mapping[str, float]
"""How much of each resource, by Ray's name for it."""


class ClusterNode(Struct, frozen=True, kw_only=True):
    """One node of a Ray cluster, as it says itself."""

    node_id: str
    host: str
    """What the nodes of one machine have in common."""
    total: Amounts
    available: Amounts


class WorkerNeed(Struct, frozen=True, kw_only=True):
    """What one worker has to have on one node."""

    role: str
    """`policy worker`, `generation engine`."""
    resources: Amounts


def worker_needs(config: MasterConfig) -> tuple[WorkerNeed, ...]:
    """Every worker that the run places: the policy's by rank, then the engines in order."""
    policy = WorkerNeed(role="policy worker", resources=_amounts(config.cluster.policy_worker))
    engine = WorkerNeed(
        role="generation engine", resources=_amounts(config.cluster.generation_engine)
    )
    return (policy,) * config.grpo.data_parallel_size + (engine,) * config.generation.engines


def local_cpus(config: MasterConfig, *, machine_cpus: int) -> int:
    """CPUs that a Ray of this run's own has to declare. They are counted, not used: a machine with
    fewer runs the same processes, more slowly."""
    needed = sum(need.resources.get(CPU, 0.0) for need in worker_needs(config))
    plane = config.data_plane
    queue = queue_cpus(plane) if isinstance(plane, TransferQueuePlaneConfig) else 0
    return max(machine_cpus, math.ceil(needed) + queue)


def queue_cpus(plane: TransferQueuePlaneConfig) -> int:
    """CPUs that TransferQueue's actors reserve: its controller one, each storage unit one."""
    return 1 + (plane.storage_units if plane.storage == "simple" else 0)


def missing_for_workers(
    needs: Sequence[WorkerNeed], nodes: Sequence[ClusterNode], *, strategy: str
) -> tuple[str, ...]:
    """Why these workers can never be placed on these nodes; empty if nothing is known.

    Fitting workers into nodes is a packing problem, which Ray's scheduler solves; here are the
    reasons that need no trying.
    """
    why = [
        f"no node has {describe_amounts(need.resources)} for a {need.role}"
        for need in _distinct(needs)
        if not any(_covers(node.total, need.resources) for node in nodes)
    ]
    sums = _sums(need.resources for need in needs)
    if strategy == "strict_pack":
        if not any(_covers(node.total, sums) for node in nodes):
            why.append(f"no node has {describe_amounts(sums)}, for strict_pack")
    else:
        there = _sums(node.total for node in nodes)
        why += [
            f"{describe_amounts({name: amount})} needed in all, the cluster has "
            f"{there.get(name, 0.0):g}"
            for name, amount in sums.items()
            if there.get(name, 0.0) < amount
        ]
    if strategy == "strict_spread" and len(needs) > len(nodes):
        why.append(f"{len(needs)} workers for {len(nodes)} nodes, for strict_spread")
    return tuple(why)


def missing_for_queue(
    plane: TransferQueuePlaneConfig, nodes: Sequence[ClusterNode]
) -> tuple[str, ...]:
    """Why TransferQueue's actors would wait for ever if they were made now; empty if they can be.

    It deals its storage units to the eligible nodes in the order of their ids, one CPU each, and
    insists on the node; its controller takes a CPU of any.
    """
    free = {node.node_id: node.available.get(CPU, 0.0) for node in nodes}
    why = []
    if plane.storage == "simple":
        wanted = plane.node_resource
        eligible = sorted(
            node.node_id for node in nodes if wanted is None or node.total.get(wanted, 0.0) > 0
        )
        if not eligible:
            return (f"no node has the resource {wanted} (data_plane.node_resource)",)
        dealt = Counter(eligible[unit % len(eligible)] for unit in range(plane.storage_units))
        for node_id, units in dealt.items():
            if free[node_id] < units:
                why.append(
                    f"node {node_id[:8]} has {free[node_id]:g} free CPUs for {units} storage units"
                )
            free[node_id] -= units
    if not any(cpus >= 1 for cpus in free.values()):
        why.append("no node has a free CPU for the queue's controller")
    return tuple(why)


def cpus_missing_for_queue(
    plane: TransferQueuePlaneConfig, before: Sequence[ClusterNode], now: Sequence[ClusterNode]
) -> float:
    """CPUs that TransferQueue's actors still wait for and the cluster does not have free.

    What was free `before` their start and is not `now` is taken for theirs.
    """
    free_before, free_now = (
        _sums(node.available for node in nodes).get(CPU, 0.0) for nodes in (before, now)
    )
    waited_for = queue_cpus(plane) - max(0.0, free_before - free_now)
    return max(0.0, waited_for - free_now)


def workers_by_host(placed_on: Sequence[str], nodes: Sequence[ClusterNode]) -> tuple[int, ...]:
    """For each worker, how many workers its host has, itself included: they share its memory.

    Args:
        placed_on: node id of each worker; all are among `nodes`.
    """
    hosts = {node.node_id: node.host for node in nodes}
    counts = Counter(hosts[node_id] for node_id in placed_on)
    return tuple(counts[hosts[node_id]] for node_id in placed_on)


def places_near_policy(
    policy: Sequence[ClusterNode], places: Sequence[ClusterNode]
) -> tuple[int, ...]:
    """Which of the engines' places each engine takes: as many routes as possible stay in a node,
    and of the others as many as possible in a host.

    Args:
        policy: the node of each policy worker, at least one.
        places: the node of each place for an engine, at least one. The places are alike.
    """
    table = plan_routes(len(policy), len(places)).unwrap()
    feeders = [policy[route.sender.rank] for route in table.routes]
    place_of: dict[int, int] = {}
    free: Sequence[int] = range(len(places))
    for site in (_node_of, _host_of, _anywhere):
        there: dict[str, deque[int]] = {}
        for place in free:
            there.setdefault(site(places[place]), deque()).append(place)
        for engine, feeder in enumerate(feeders):
            if engine not in place_of and (near := there.get(site(feeder))):
                place_of[engine] = near.popleft()
        free = sorted(set(range(len(places))).difference(place_of.values()))
    return tuple(place_of[engine] for engine in range(len(places)))


def _node_of(node: ClusterNode) -> str:
    return node.node_id


def _host_of(node: ClusterNode) -> str:
    return node.host


def _anywhere(node: ClusterNode) -> str:
    return ""


def describe_needs(needs: Sequence[WorkerNeed]) -> str:
    """`1 policy worker (1 CPU), 2 generation engines (1 CPU, 1 GPU each)`."""
    parts = []
    for need in _distinct(needs):
        count = sum(other == need for other in needs)
        plural, each = ("s", " each") if count > 1 else ("", "")
        parts.append(f"{count} {need.role}{plural} ({describe_amounts(need.resources)}{each})")
    return ", ".join(parts)


def describe_nodes(nodes: Sequence[ClusterNode], names: Sequence[str] = (CPU, GPU)) -> str:
    """What each node has free, of what it has, of the named resources."""
    return "; ".join(
        f"node {node.node_id[:8]} on {node.host}: "
        + (
            ", ".join(
                f"{node.available.get(name, 0.0):g} of {node.total[name]:g} {name} free"
                for name in names
                if node.total.get(name, 0.0) > 0
            )
            or f"no {' or '.join(names)}"
        )
        for node in nodes
    )


def describe_amounts(amounts: Amounts) -> str:
    """`1 CPU, 0.5 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"


def _amounts(resources: WorkerResources) -> dict[str, float]:
    named = {CPU: resources.cpus, GPU: resources.gpus, **resources.custom}
    return {name: amount for name, amount in named.items() if amount > 0}


def _covers(pool: Amounts, wanted: Amounts) -> bool:
    return all(pool.get(name, 0.0) >= amount for name, amount in wanted.items())


def _sums(parts: Iterable[Amounts]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def _distinct(needs: Sequence[WorkerNeed]) -> list[WorkerNeed]:
    found: list[WorkerNeed] = []
    for need in needs:
        if need not in found:
            found.append(need)
    return found
