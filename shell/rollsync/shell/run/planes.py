"""The data plane that a configuration names, for the length of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rollsync.pure.config import DataPlaneConfig, InProcessPlaneConfig
from rollsync.shell.rollout.data_plane import DataPlane, InProcessDataPlane


@contextmanager
def running_plane(config: DataPlaneConfig) -> Iterator[DataPlane]:
    """The plane, started; what it started ends with the context. Ray has to be initialized.

    Raises:
        DataPlaneError: it cannot be started.
    """
    if isinstance(config, InProcessPlaneConfig):
        yield InProcessDataPlane()
        return
    # Rows come as bytes, with which several threads are of no use; else it warns at every call.
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    # An optional package, which takes seconds to import, and reads this then.
    from rollsync.shell.rollout.data_plane.queue_service import running_queue
    from rollsync.shell.rollout.data_plane.transfer_queue import TransferQueueDataPlane

    with running_queue(config) as actors:
        yield TransferQueueDataPlane(deadline_s=config.deadline_s, gone=actors.gone)
