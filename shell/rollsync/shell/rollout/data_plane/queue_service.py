"""Starts a TransferQueue for one run, says which of its actors are gone, and ends it with the run.

TransferQueue has one name per Ray cluster: whoever comes second is attached to the first one's
queue, and loses it when the first one ends. Its start waits without end for the CPUs of its actors,
and its answers for an actor that has died. Rules kept here: a run has a queue that it made itself;
what would make the start hang is looked for before it, and the start has a deadline all the same.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import ray
import transfer_queue
from omegaconf import OmegaConf
from ray.exceptions import RayError

from rollsync.pure.config import TransferQueuePlaneConfig
from rollsync.pure.placement import (
    CPU,
    ClusterNode,
    cpus_missing_for_queue,
    describe_nodes,
    missing_for_queue,
    queue_cpus,
)
from rollsync.shell.actor_deaths import is_death
from rollsync.shell.cluster import cluster_nodes
from rollsync.shell.refit.worker_group import Actor, call_remote
from rollsync.shell.rollout.errors import DataPlaneError, DataPlaneLost

_NAMESPACE = "transfer_queue"
_CONTROLLER = "TransferQueueController"
_OBJECT_STORAGE = "RayObjectRefStorage"
_ACTORS = (_CONTROLLER, _OBJECT_STORAGE)
"""Names that TransferQueue gives to actors, one each per cluster."""
_LOOK_AGAIN_S = 0.2
_ANSWER_S = 2.0
"""An actor that takes longer is busy, and not known to be gone."""


class QueueActors:
    """The actors of a queue, from the moment that each of them is there."""

    def __init__(self, config: TransferQueuePlaneConfig) -> None:
        # Storage units have no namespace of their own: they are in this job's.
        job = ray.get_runtime_context().namespace
        units = [f"TransferQueueStorageUnit#{unit}" for unit in range(config.storage_units)]
        storage = (
            {_OBJECT_STORAGE: _NAMESPACE} if config.storage == "ray" else dict.fromkeys(units, job)
        )
        self._namespaces = {_CONTROLLER: _NAMESPACE, **storage}
        self._actors: dict[str, Actor] = {}

    def find(self) -> None:
        """Get to know those that have come since."""
        for name, namespace in self._namespaces.items():
            if name not in self._actors and _exists(name, namespace):
                self._actors[name] = ray.get_actor(name, namespace=namespace)

    async def gone(self) -> tuple[str, ...]:
        """Those whose processes have ended; with them what they held."""
        names = list(self._actors)
        found = await asyncio.gather(*(_is_gone(self._actors[name]) for name in names))
        return tuple(name for name, gone in zip(names, found, strict=True) if gone)


async def _is_gone(actor: Actor) -> bool:
    try:
        async with asyncio.timeout(_ANSWER_S):
            await call_remote(actor, "__ray_ready__")
    except (TimeoutError, RayError) as error:
        return is_death(error)
    return False


@contextmanager
def running_queue(config: TransferQueuePlaneConfig) -> Iterator[QueueActors]:
    """A TransferQueue of this process's own, on the Ray cluster that it is connected to.

    Raises:
        DataPlaneError: another run's queue stays, its actors' CPUs are not free, or it has not
            started within the deadline.
        DataPlaneLost: an actor of it died meanwhile.
    """
    _wait_for_the_name(config.deadline_s)
    _wait_for_the_cpus(config)
    actors = QueueActors(config)
    try:
        _start(config, actors)
        yield actors
    finally:
        transfer_queue.close()
        _end_object_storage()


def _wait_for_the_name(deadline_s: float) -> None:
    """Actors of a run that was killed go when Ray has noticed; those of another run stay."""
    there = _in_the_way(lambda: [name for name in _ACTORS if _exists(name, _NAMESPACE)], deadline_s)
    if there:
        raise DataPlaneError(
            f"this Ray cluster already has a TransferQueue ({', '.join(there)}), and can have "
            f"only one; it is still there after {deadline_s:g} s",
            remedy="end the run that it belongs to, use another cluster, or set "
            "data_plane.backend to in_process",
        )


def _exists(name: str, namespace: str) -> bool:
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True


def _wait_for_the_cpus(config: TransferQueuePlaneConfig) -> None:
    why = _in_the_way(lambda: missing_for_queue(config, cluster_nodes()), config.deadline_s)
    if why:
        raise DataPlaneError(
            f"TransferQueue needs {queue_cpus(config)} free CPUs and would wait for them "
            f"without end: {'; '.join(why)}; the cluster has {_cpus_of(cluster_nodes())}",
            remedy="give the cluster more CPUs (they are counted, not used), or lower "
            "data_plane.storage_units",
        )


def _in_the_way(look: Callable[[], Sequence[str]], deadline_s: float) -> Sequence[str]:
    """Waits until `look` finds nothing, or for `deadline_s`; what it found last."""
    until_s = time.monotonic() + deadline_s
    while (found := look()) and time.monotonic() < until_s:
        time.sleep(_LOOK_AGAIN_S)
    return found


def _start(config: TransferQueuePlaneConfig, actors: QueueActors) -> None:
    """Its start takes no deadline, and does not notice when one of its actors dies meanwhile: it
    gets a thread, which is left behind if need be."""
    before, until_s = cluster_nodes(), time.monotonic() + config.deadline_s
    failed: list[BaseException] = []

    def start() -> None:
        try:
            transfer_queue.init(OmegaConf.create(_settings(config)))
        except (Exception, SystemExit) as error:  # The latter when Ray ends meanwhile.
            failed.append(error)

    thread = threading.Thread(target=start, name="TransferQueue's start", daemon=True)
    thread.start()
    while thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
        thread.join(min(left_s, _LOOK_AGAIN_S))
        actors.find()
        if gone := asyncio.run(actors.gone()):
            raise _died_at_the_start(", ".join(gone))
    actors.find()
    if thread.is_alive():
        raise _too_late(config, before, cluster_nodes())
    if failed:
        if is_death(failed[0]):
            raise _died_at_the_start(f"an actor ({failed[0]})") from failed[0]
        raise DataPlaneError(
            f"TransferQueue has not started: {type(failed[0]).__name__}: {failed[0]}",
            remedy="see Ray's logs of its controller and its storage units",
        ) from failed[0]


def _died_at_the_start(who: str) -> DataPlaneLost:
    return DataPlaneLost(
        f"{who} of TransferQueue died while it started",
        remedy="see Ray's logs of it; the same command starts the run again",
    )


def _too_late(
    config: TransferQueuePlaneConfig, before: Sequence[ClusterNode], now: Sequence[ClusterNode]
) -> DataPlaneError:
    """What to say of a start that took too long: it lacked CPUs, or only time."""
    late = f"TransferQueue has not started within {config.deadline_s:g} s"
    missing = cpus_missing_for_queue(config, before, now)
    if missing > 0:
        return DataPlaneError(
            f"{late}: it waits for {missing:g} of its {queue_cpus(config)} CPUs; the cluster has "
            f"{_cpus_of(now)}",
            remedy="give it nodes whose CPUs nobody else takes meanwhile",
        )
    return DataPlaneError(
        f"{late}, and has the {queue_cpus(config)} CPUs that it reserves: its processes are slow "
        "to start, as on a machine that has much else to do",
        remedy="set a longer data_plane.deadline_s; if that does not help, see Ray's logs of its "
        "controller and its storage units",
    )


def _cpus_of(nodes: Sequence[ClusterNode]) -> str:
    return describe_nodes(nodes, (CPU,))


def _settings(config: TransferQueuePlaneConfig) -> dict[str, object]:
    if config.storage == "ray":
        return {"backend": {"storage_backend": "RayStore"}}
    simple = {
        "num_data_storage_units": config.storage_units,
        "required_node_resource": config.node_resource,
    }
    return {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": simple}}


def _end_object_storage() -> None:
    """TransferQueue leaves this one behind."""
    try:
        ray.kill(ray.get_actor(_OBJECT_STORAGE, namespace=_NAMESPACE))
    except ValueError:
        return
