"""How much memory a worker may count on: its accelerator's, or its share of the host's."""

import os
from pathlib import Path

import psutil
import torch

from rollsync.pure.refit.bucket_size import HostMemory, host_memory_share
from rollsync.shell.refit.engines.metadata import host_identity

_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux tells a container its memory limit: control groups version 2, then version 1."""


def worker_total_memory_bytes(workers_on_host: int) -> int:
    """Total memory of this worker, in bytes, as the bucket size is derived from it.

    Args:
        workers_on_host: how many workers share the host, for one without an accelerator.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return host_memory_share(
        host_bytes=psutil.virtual_memory().total,
        container_limit_bytes=container_limit_bytes(_LIMIT_FILES),
        workers_on_host=workers_on_host,
    )


def shared_memory_of(worker: object) -> HostMemory | None:
    """The memory that the worker of this process shares with others; None with an accelerator."""
    del worker  # Ray gives it to what an actor is asked to call.
    if torch.cuda.is_available():
        return None
    return HostMemory(host_identity(), worker_total_memory_bytes(1))


def container_limit_bytes(limit_files: tuple[Path, ...]) -> int | None:
    """The container's limit from the first file that is there; None where it sets none."""
    for path in limit_files:
        if path.exists():
            limit = path.read_text(encoding="ascii").strip()
            return int(limit) if limit.isdigit() else None
    return None


def local_world_size() -> int:
    """How many workers of one launch share this host, as torchrun tells them; at least 1."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
