"""Starts a TransferQueue for one run and ends it with the run.

TransferQueue has one name per Ray cluster: whoever comes second is attached to the first one's
queue, and loses it when the first one ends. And its start waits without end for the CPUs of its
actors. Rules kept here: a run has a queue that it made itself; what would make the start hang is
looked for before it, and the start has a deadline all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import transfer_queue
from omegaconf import OmegaConf

from rollsync.pure.config import TransferQueuePlaneConfig
from rollsync.pure.placement import CPU, describe_nodes, missing_for_queue, queue_cpus
from rollsync.shell.cluster import cluster_nodes
from rollsync.shell.rollout.errors import DataPlaneError

_NAMESPACE = "transfer_queue"
_ACTORS = ("TransferQueueController", "RayObjectRefStorage")
"""Names that TransferQueue gives to actors, one each per cluster."""
_LOOK_AGAIN_S = 0.2


@contextmanager
def running_queue(config: TransferQueuePlaneConfig) -> Iterator[None]:
    """A TransferQueue of this process's own, on the Ray cluster that it is connected to.

    Raises:
        DataPlaneError: another run's queue stays, its actors' CPUs are not free, or it has not
            started within the deadline.
    """
    _wait_for_the_name(config.deadline_s)
    _wait_for_the_cpus(config)
    try:
        _start(config)
        yield
    finally:
        transfer_queue.close()
        _end_object_storage()


def _wait_for_the_name(deadline_s: float) -> None:
    """Actors of a run that was killed go when Ray has noticed; those of another run stay."""
    until_s = time.monotonic() + deadline_s
    while there := [name for name in _ACTORS if _exists(name)]:
        if time.monotonic() >= until_s:
            raise DataPlaneError(
                f"this Ray cluster already has a TransferQueue ({', '.join(there)}), and can have "
                f"only one; it is still there after {deadline_s:g} s",
                remedy="end the run that it belongs to, use another cluster, or set "
                "data_plane.backend to in_process",
            )
        time.sleep(_LOOK_AGAIN_S)


def _exists(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        return False
    return True


def _wait_for_the_cpus(config: TransferQueuePlaneConfig) -> None:
    until_s = time.monotonic() + config.deadline_s
    while why := missing_for_queue(config, nodes := cluster_nodes()):
        if time.monotonic() >= until_s:
            raise DataPlaneError(
                f"TransferQueue needs {queue_cpus(config)} free CPUs and would wait for them "
                f"without end: {'; '.join(why)}; the cluster has {describe_nodes(nodes, (CPU,))}",
                remedy="give the cluster more CPUs (they are counted, not used), or lower "
                "data_plane.storage_units",
            )
        time.sleep(_LOOK_AGAIN_S)


def _start(config: TransferQueuePlaneConfig) -> None:
    """Its start takes no deadline, so it gets a thread that is left behind if need be."""
    failed: list[BaseException] = []

    def start() -> None:
        try:
            transfer_queue.init(OmegaConf.create(_settings(config)))
        except (Exception, SystemExit) as error:  # The latter when Ray ends meanwhile.
            failed.append(error)

    thread = threading.Thread(target=start, name="TransferQueue's start", daemon=True)
    thread.start()
    thread.join(config.deadline_s)
    if thread.is_alive():
        raise DataPlaneError(
            f"TransferQueue has not started within {config.deadline_s:g} s; the cluster has "
            f"{describe_nodes(cluster_nodes(), (CPU,))}",
            remedy="give it nodes whose CPUs nobody else takes meanwhile, or a longer "
            "data_plane.deadline_s",
        )
    if failed:
        raise DataPlaneError(
            f"TransferQueue has not started: {type(failed[0]).__name__}: {failed[0]}",
            remedy="see Ray's logs of its controller and its storage units",
        ) from failed[0]


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
        ray.kill(ray.get_actor("RayObjectRefStorage", namespace=_NAMESPACE))
    except ValueError:
        return
