"""Joins a Ray cluster, or starts one, and has it set aside what the run's workers need.

Rules kept here: every wait has a deadline, and after it the error says what is needed and what the
cluster has; what was set aside is given back when the run ends, however it ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollsync.pure.config import ClusterConfig, MasterConfig
from rollsync.pure.placement import (
    CPU,
    GPU,
    ClusterNode,
    WorkerNeed,
    describe_needs,
    describe_nodes,
    local_cpus,
    missing_for_workers,
    places_near_policy,
    worker_needs,
    workers_by_host,
)
from rollsync.shell.cluster import ClusterError, cluster_nodes


@contextmanager
def connected(config: MasterConfig) -> Iterator[None]:
    """This process as the driver of a job on the configuration's cluster.

    Raises:
        ClusterError: there is no cluster at the address.
    """
    address = config.cluster.address
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=local_cpus(config, machine_cpus=os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        else:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
    except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"no Ray cluster can be joined at {address or 'this machine'}: {error}",
            remedy="start one (ray start --head), run this command on one of its nodes, and give "
            "its address as cluster.address",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


class WorkerPlacement:
    """What the cluster has set aside for each worker of a run. An engine is as near as it can be to
    the policy worker that feeds it.

    Args:
        group: one bundle for each of `needs`, in their order.
        needs: the workers, the policy's first.
        nodes: the node of each worker.
        policy_workers: how many of them are the policy's.
    """

    def __init__(
        self,
        group: PlacementGroup,
        needs: Sequence[WorkerNeed],
        nodes: Sequence[ClusterNode],
        *,
        policy_workers: int,
    ) -> None:
        self._group = group
        self._needs = needs
        self._nodes = nodes
        self._hosts = workers_by_host([node.node_id for node in nodes], nodes)
        places = places_near_policy(nodes[:policy_workers], nodes[policy_workers:])
        # By the slot of the engine.
        self._engine_bundles = tuple(policy_workers + place for place in places)

    def policy_options(self, rank: int) -> dict[str, object]:
        """Options of a policy worker's actor."""
        return self._options(rank)

    def engine_options(self, slot: int) -> dict[str, object]:
        """Options of the actor of a slot's engine: the same for each engine that has the slot."""
        return self._options(self._engine_bundles[slot])

    def policy_workers_on_host(self, rank: int) -> int:
        """How many workers have the host of a policy worker, itself included."""
        return self._hosts[rank]

    def engine_workers_on_host(self, slot: int) -> int:
        """How many workers have the host of an engine, itself included."""
        return self._hosts[self._engine_bundles[slot]]

    def policy_node(self, rank: int) -> ClusterNode:
        """Where a policy worker is."""
        return self._nodes[rank]

    def engine_node(self, slot: int) -> ClusterNode:
        """Where an engine is."""
        return self._nodes[self._engine_bundles[slot]]

    def _options(self, bundle: int) -> dict[str, object]:
        resources = dict(self._needs[bundle].resources)
        return {
            "num_cpus": resources.pop(CPU, 0.0),
            "num_gpus": resources.pop(GPU, 0.0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }


@contextmanager
def placed_workers(config: MasterConfig) -> Iterator[WorkerPlacement]:
    """Room for the run's workers, until the end of the context.

    Raises:
        ClusterError: the cluster does not have it, or not within `cluster.deadline_s`.
    """
    needs, cluster = worker_needs(config), config.cluster
    if cluster.address is None and (why := _missing(needs, cluster, cluster_nodes())):
        # No other node will join a Ray of the run's own.
        raise _no_room(needs, why, cluster_nodes(), waited_s=0)
    # A bundle may not be empty, and a worker that needs nothing can be anywhere.
    bundles = [dict(need.resources) or {CPU: 0.001} for need in needs]
    group = placement_group(bundles, strategy=cluster.strategy.upper())
    try:
        if not group.wait(timeout_seconds=cluster.deadline_s):
            nodes = cluster_nodes()
            why = _missing(needs, cluster, nodes) or ("others hold what there is",)
            raise _no_room(needs, why, nodes, waited_s=cluster.deadline_s)
        yield WorkerPlacement(
            group, needs, _nodes_of(group), policy_workers=config.grpo.data_parallel_size
        )
    finally:
        remove_placement_group(group)


def _missing(
    needs: Sequence[WorkerNeed], cluster: ClusterConfig, nodes: Sequence[ClusterNode]
) -> tuple[str, ...]:
    return missing_for_workers(needs, nodes, strategy=cluster.strategy)


def _no_room(
    needs: Sequence[WorkerNeed],
    why: Sequence[str],
    nodes: Sequence[ClusterNode],
    *,
    waited_s: float,
) -> ClusterError:
    names = tuple(dict.fromkeys((CPU, GPU, *(name for need in needs for name in need.resources))))
    return ClusterError(
        f"the run needs {describe_needs(needs)}, and did not get it within {waited_s:g} s: "
        f"{'; '.join(why)}. The cluster: {describe_nodes(nodes, names)}",
        remedy="free or add nodes, ask for less (cluster.policy_worker, "
        "cluster.generation_engine, grpo.data_parallel_size, generation.engines, "
        "cluster.strategy), or wait longer (cluster.deadline_s)",
    )


def _nodes_of(group: PlacementGroup) -> tuple[ClusterNode, ...]:
    """The node of each bundle, in their order."""
    table: Mapping[str, Mapping[int, str]] = placement_group_table(group)
    nodes = {node.node_id: node for node in cluster_nodes()}
    return tuple(nodes[node] for _, node in sorted(table["bundles_to_node_id"].items()))
