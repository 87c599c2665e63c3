"""The actors of a Ray cluster, for who wants to kill them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

QUEUE_STORAGE = ("SimpleStorageUnit", "RayObjectRefStorage")
QUEUE_CONTROLLER = ("TransferQueueController",)
"""Classes of TransferQueue's actors."""


def actor_processes(root: int, classes: Collection[str]) -> list[int]:
    """Actors of these classes on the Ray clusters that process `root` has started."""
    started = {process.pid for process in psutil.Process(root).children(recursive=True)}
    # It passes over those that end meanwhile.
    titles = {each.pid: each.info["cmdline"] or [""] for each in psutil.process_iter(["cmdline"])}
    # Ray writes `ray::Class`, and `ray::Class.method` while it is called.
    return [
        pid
        for pid in sorted(started & titles.keys())
        if titles[pid][0].removeprefix("ray::").partition(".")[0] in classes
    ]


def kill_actor(actor: Any) -> None:
    """Kill an actor, and wait until Ray knows that it is dead: the kill itself is only ordered."""
    ray.kill(actor)
    with contextlib.suppress(RayActorError):
        while True:
            ray.get(actor.__ray_ready__.remote())
