"""What the workers of a built-in engine know of each other before they meet: their metadata.

Rule kept here: every worker has the same metadata of all, policy workers first, and all of them
run one engine with one value of `relay`, so that all make the same table of routes of it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from rollsync.pure.refit import PolicyWorker, RoutingTable, Sites, plan_routes
from rollsync.pure.refit.routes import Worker
from rollsync.shell.refit.errors import RefitConfigurationError, accepted

HOST_LABEL: Final = "ROLLSYNC_HOST_LABEL"
"""Workers in whose environment this differs count as on different hosts."""


def host_identity() -> str:
    """What only processes that can share memory have in common: a kernel, and the name space that
    its sockets are in. `HOST_LABEL` in the environment tells apart what these do not."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    found = f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    label = os.environ.get(HOST_LABEL)
    return f"{found}/{label}" if label else found


def checked_metadata(
    metadata: Sequence[object],
    *,
    backend: str,
    relay: bool,
    train_world_size: int,
    rollout_world_size: int,
) -> list[Mapping[str, object]]:
    """The workers' metadata, if all of them answered as a worker of these options does.

    Raises:
        RefitConfigurationError: some did not, or they are too few or too many.
    """
    expected = train_world_size + rollout_world_size
    if len(metadata) != expected:
        raise RefitConfigurationError(
            f"{len(metadata)} workers answered, {expected} are expected"
            f" ({train_world_size} policy and {rollout_world_size} rollout workers)",
            remedy="give the world sizes of the workers that run",
        )
    workers: list[Mapping[str, object]] = []
    for index, item in enumerate(metadata):
        if not isinstance(item, Mapping) or item.get("backend") != backend:
            raise RefitConfigurationError(
                f"worker {index} of the metadata does not run the {backend} engine",
                remedy="configure the same checkpoint engine on every worker",
            )
        if bool(item.get("relay")) != relay:
            raise RefitConfigurationError(
                f"worker {index} of the metadata has relay: {item.get('relay')}, this worker"
                f" {relay}",
                remedy="give every worker the same engine_kwargs",
            )
        workers.append(item)
    return workers


def index_of(worker: Worker, train_world_size: int) -> int:
    """Where a worker's metadata is among those of all, policy workers first."""
    return worker.rank + (0 if isinstance(worker, PolicyWorker) else train_world_size)


def routes_between(
    workers: Sequence[Mapping[str, object]], train_world_size: int, *, relay: bool
) -> RoutingTable:
    """The routes of all workers, from their metadata."""
    policy, rollout = workers[:train_world_size], workers[train_world_size:]
    sites = Sites(
        policy_hosts=tuple(str(worker["host"]) for worker in policy),
        rollout_hosts=tuple(str(worker["host"]) for worker in rollout),
        # Workers of one rank in equal engines keep the same part of the weights.
        rollout_shards=tuple(_rank_in_engine(worker) for worker in rollout),
    )
    return accepted(plan_routes(len(policy), len(rollout), sites if relay else None))


def _rank_in_engine(worker: Mapping[str, object]) -> int:
    rank = worker.get("rank", 0)
    return rank if isinstance(rank, int) else 0
