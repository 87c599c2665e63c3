"""Where the actors of a Ray cluster are, for who wants to kill them."""

from __future__ import annotations

from collections.abc import Collection

import psutil

QUEUE_STORAGE = ("SimpleStorageUnit", "RayObjectRefStorage")
QUEUE_CONTROLLER = ("TransferQueueController",)
"""Classes of TransferQueue's actors."""


def actor_processes(root: int, classes: Collection[str]) -> list[int]:
    """Actors of these classes on the Ray clusters that process `root` has started."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            title = process.cmdline()[:1]
        except psutil.NoSuchProcess:
            continue
        # Ray writes `ray::Class`, and `ray::Class.method` while it is called.
        if title and title[0].removeprefix("ray::").partition(".")[0] in classes:
            found.append(process.pid)
    return found
