"""The Ray cluster as pure decisions see it: its nodes, what they have, and what is free.

Rule kept here: nothing is decided; the values are those of one moment.
"""

from __future__ import annotations

import ray
from ray._private.state import available_resources_per_node

from rollsync.pure.placement import ClusterNode
from rollsync.shell.errors import RollsyncError


class ClusterError(RollsyncError):
    """The cluster cannot be reached, or does not have what the run needs."""


def cluster_nodes() -> tuple[ClusterNode, ...]:
    """The nodes that are alive, in the order of their ids. Ray has to be initialized."""
    # Ray has no public call for what is free on each node.
    free = available_resources_per_node()
    return tuple(
        ClusterNode(
            node_id=node["NodeID"],
            host=node["NodeManagerHostname"],
            total=dict(node["Resources"]),
            available=dict(free.get(node["NodeID"], {})),
        )
        for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"]))
        if node["Alive"]
    )
