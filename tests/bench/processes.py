"""The processes of a benchmark, which do what they are told over a pipe each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess


def spawned(
    serve: Callable[..., None], count: int, *arguments: object
) -> tuple[list[Connection], list[BaseProcess]]:
    """Start processes, from nothing of this one's memory.

    Args:
        serve: what each does, given its end of its pipe, its number and the arguments.
        count: how many.

    Returns:
        This process's ends of the pipes, and the processes, by their numbers.
    """
    spawning = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for number in range(count):
        mine, theirs = spawning.Pipe()
        process = spawning.Process(target=serve, args=(theirs, number, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    return pipes, processes
