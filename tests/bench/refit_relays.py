"""Weights from a policy process to two rollout processes, which are on other hosts than it as far
as all can tell: the policy sends to both, or to the first, which relays to the second.

There is no link between hosts here, so this shows what relaying costs, and not what it saves: all
ways share two cores, one of which copies as fast as the figure of a memory copy says. Rates are of
one copy of the model, from the start until everybody has loaded it. Called by `bench_refit`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import torch

from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.metadata import HOST_LABEL
from tests.bench.measure import row
from tests.bench.processes import spawned
from tests.bench.refit_stream import connect, stream

ROUNDS: Final = 5
_BUCKET_BYTES: Final = 12 << 20
_FLAT_BYTES: Final = 512 << 20
COPY: Final = "memory copy beside idle rollout processes"
Shapes = Sequence[tuple[str, tuple[int, ...]]]


class Way(NamedTuple):
    """How the weights reach all.

    Attributes:
        backend: the engine.
        hosts: of the policy process, and of each rollout process.
        relay: whether rollout processes may relay.
    """

    backend: str
    hosts: tuple[str, ...]
    relay: bool


ONE: Final = "nixl, to one rollout process"
TWO: Final = "nixl, to two rollout processes"
WAYS: Final[Mapping[str, Way]] = {
    ONE: Way("nixl", ("policy", "a"), relay=False),
    TWO: Way("nixl", ("policy", "a", "b"), relay=False),
    "nixl, relayed to the second": Way("nixl", ("policy", "a", "b"), relay=True),
    "nixl, relayed to the second by shm": Way("auto", ("policy", "a", "a"), relay=True),
}
_PROCESSES: Final = max(len(way.hosts) for way in WAYS.values())


class _End:
    """The policy (0) or a rollout process."""

    def __init__(self, index: int, shapes: Shapes) -> None:
        torch.set_num_threads(1)
        self._index = index
        self._weights = {name: torch.ones(size, dtype=torch.bfloat16) for name, size in shapes}
        self._flat = torch.ones(_FLAT_BYTES, dtype=torch.uint8) if index == 0 else None
        self._engines: dict[str, CheckpointEngine] = {}

    def copy(self) -> None:
        """One memory copy by one thread, which finds its destination as it was before."""
        if self._flat is not None:
            half = _FLAT_BYTES // 2
            self._flat[:half].copy_(self._flat[half:])

    def prepare(self, name: str) -> dict[str, object]:
        """Make an engine of a way; its metadata."""
        way = WAYS[name]
        os.environ[HOST_LABEL] = way.hosts[self._index]
        engine = self._engines[name] = create_checkpoint_engine(
            way.backend, bucket_size_bytes=_BUCKET_BYTES, engine_kwargs={"relay": way.relay}
        )
        return engine.prepare()

    def connect(self, name: str, metadata: Sequence[object]) -> None:
        """Let that engine know the others."""
        connect(self._engines[name], self._index, metadata)

    def sync(self, name: str) -> None:
        """One stream."""
        asyncio.run(stream(self._engines[name], self._index, self._weights))

    def finalize(self) -> None:
        """Give all engines back."""
        for engine in self._engines.values():
            engine.finalize()


def _serve(pipe: Connection, index: int, shapes: Shapes) -> None:
    end = _End(index, shapes)
    while (command := pipe.recv()) is not None:
        method, *arguments = command
        pipe.send(getattr(end, method)(*arguments))


class _Ends:
    """All processes."""

    def __init__(self, shapes: Shapes) -> None:
        self._pipes, self._processes = spawned(_serve, _PROCESSES, shapes)

    def ask(self, count: int, *command: object) -> list[Any]:
        """Let the first of them do something at once."""
        for pipe in self._pipes[:count]:
            pipe.send(command)
        return [pipe.recv() for pipe in self._pipes[:count]]

    def timed(self, count: int, *command: object) -> float:
        """Seconds of that."""
        start = time.perf_counter()
        self.ask(count, *command)
        return time.perf_counter() - start

    def close(self) -> None:
        """End all."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()


def relay_rows(model: Shapes) -> list[dict[str, object]]:
    """The figures.

    Args:
        model: names and shapes of a model's tensors, of bfloat16.
    """
    with ExitStack() as closing:
        ends = _Ends(model)
        closing.callback(ends.close)
        for name, way in WAYS.items():
            metadata = ends.ask(len(way.hosts), "prepare", name)
            ends.ask(len(way.hosts), "connect", name, metadata)
        seconds: dict[str, list[float]] = {name: [] for name in (COPY, *WAYS)}
        for _ in range(ROUNDS + 1):
            # The first round sets connections up.
            seconds[COPY].append(ends.timed(1, "copy"))
            for name, way in WAYS.items():
                seconds[name].append(ends.timed(len(way.hosts), "sync", name))
        ends.ask(_PROCESSES, "finalize")
    model_bytes = sum(2 * torch.Size(shape).numel() for _, shape in model)
    rates = {
        name: (_FLAT_BYTES // 2 if name == COPY else model_bytes) / statistics.median(each[1:])
        for name, each in seconds.items()
    }
    result = [row(name, rate / 1e9, "GB/s") for name, rate in rates.items()]
    for name, rate in rates.items():
        result += [
            row(name, rate / 1e9, "GB/s", against=other, ratio=rate / rates[other])
            for other in (COPY, ONE, TWO)
            if name not in (COPY, ONE, other)
        ]
    return result
