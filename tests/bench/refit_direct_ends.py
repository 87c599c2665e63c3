"""The two processes of `refit_direct`, a core each: what one of them does when it is told to."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from rollsync.pure.refit.control import Destination
from rollsync.pure.refit.load_plan import Copy, Region
from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.direct import Destinations, DirectEngine
from rollsync.shell.refit.engines.direct_reads import memory_at
from rollsync.shell.refit.engines.nixl_agent import NixlAgent
from rollsync.shell.refit.engines.process_memory import read_memory
from rollsync.shell.refit.weights import dtype_name
from tests.bench.processes import spawned
from tests.bench.refit_stream import connect

FLAT_BYTES: Final = 512 << 20
_BUCKET_BYTES: Final = 64 << 20
_HASHED_BYTES: Final = 2 << 20
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_THP_DISABLE: Final = 41
Shapes = Sequence[tuple[str, tuple[int, ...]]]
Places = Sequence[tuple[int, int]]
"""Address and bytes of each piece of memory."""
Variant = tuple[str, bool]
"""An engine's name, and whether it has checksums."""
_libc: Final = ctypes.CDLL(None)


def destinations_to(parameters: Mapping[str, torch.Tensor]) -> Destinations:
    """Where tensors of the same names are read into as they are."""
    whole = {name: Region(0, each.nbytes) for name, each in parameters.items()}
    wanted = [
        Destination(
            name=name,
            shape=tuple(each.shape),
            dtype=dtype_name(each.dtype),
            regions=(whole[name],),
        )
        for name, each in parameters.items()
    ]
    copies = {name: [Copy(region, name, region)] for name, region in whole.items()}
    return Destinations(wanted, copies, parameters)


class End:
    """The policy (rank 0) or the rollout worker (rank 1), in ordinary pages until it allows
    others."""

    def __init__(self, rank: int, sets: Mapping[str, Shapes]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
        # Where siblings may not read each other's memory, the raw read may.
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_long(-1), 0, 0, 0)
        _libc.prctl(_PR_SET_THP_DISABLE, ctypes.c_ulong(1), 0, 0, 0)
        self._rank = rank
        self._weights = {
            key: {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes}
            for key, shapes in sets.items()
        }
        self._weights["flat"] = {"flat": torch.ones(FLAT_BYTES, dtype=torch.uint8)}
        self._other = torch.zeros(FLAT_BYTES, dtype=torch.uint8)
        self._engines: dict[Variant, CheckpointEngine] = {}
        self._agent = NixlAgent("UCX", {})
        self._registered = [*self._weights["model"].values(), *self._weights["flat"].values()]
        self._agent.register(self._registered)
        self._peer = ""

    def allow_large_pages(self) -> None:
        """Let the kernel give this process large pages from now on."""
        _libc.prctl(_PR_SET_THP_DISABLE, ctypes.c_ulong(0), 0, 0, 0)

    def large_bytes(self) -> int:
        """How much memory of this process is in large pages."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHuge"))

    def identify(self) -> tuple[int, bytes]:
        """This process, and its agent."""
        return os.getpid(), self._agent.metadata

    def meet(self, agent: bytes) -> None:
        """Learn of the other end's agent."""
        self._peer = self._agent.meet(agent)

    def places(self, key: str) -> Places:
        """Where weights are."""
        return [(each.data_ptr(), each.nbytes) for each in self._weights[key].values()]

    def copy(self) -> None:
        """Copy the flat memory."""
        self._other.copy_(self._weights["flat"]["flat"])

    def read_shm(self, process: int, places: Places, key: str) -> None:
        """Let the kernel read the other end's weights into this one's, each by one call."""
        for (address, size), mine in zip(places, self._weights[key].values(), strict=True):
            read_memory(process, [address, size], [mine.data_ptr(), size])

    def hash_shm(self, process: int, places: Places, key: str) -> None:
        """The same as `read_shm` in slices, each hashed while it is in the cache."""
        for (address, size), mine in zip(places, self._weights[key].values(), strict=True):
            checksum = xxhash.xxh3_64()
            for first in range(0, size, _HASHED_BYTES):
                here, part = mine.data_ptr() + first, min(size - first, _HASHED_BYTES)
                read_memory(process, [address + first, part], [here, part])
                checksum.update(memory_at(here, part))

    def read_nixl(self, process: int, places: Places, key: str) -> None:
        """The same by NIXL, each by one read."""
        del process
        for (address, _), mine in zip(places, self._weights[key].values(), strict=True):
            read = self._agent.read(self._peer, (address, 0, "DRAM"), mine)
            while not read.is_done():
                pass
            read.release()

    def answer(self, pipe: Connection) -> None:
        """Do what the other end's agent may need, until there is a next command."""
        while not pipe.poll():
            self._agent.progress()
            time.sleep(0.0002)

    def prepare(self, variant: Variant) -> dict[str, object]:
        """Make an engine; its metadata."""
        backend, checksum = variant
        engine = self._engines[variant] = create_checkpoint_engine(
            backend,
            bucket_size_bytes=_BUCKET_BYTES,
            engine_kwargs={"checksum": checksum, "direct": True},
        )
        return engine.prepare()

    def connect(self, variant: Variant, metadata: list[object]) -> None:
        """Let an engine know the other end."""
        connect(self._engines[variant], self._rank, metadata)

    def aim(self, variant: Variant, key: str) -> None:
        """Let the rollout worker's engine know where to read to."""
        engine = self._engines[variant]
        if self._rank == 1 and isinstance(engine, DirectEngine):
            engine.read_into(destinations_to(self._weights[key]))

    def sync(self, variant: Variant, key: str) -> None:
        """One stream, nothing of which comes in batches."""
        engine = self._engines[variant]
        if self._rank == 0:
            asyncio.run(engine.send_weights(self._weights[key].items()))
        else:
            asyncio.run(_receive_nothing(engine))

    def finalize(self) -> None:
        """Give all engines back."""
        for engine in self._engines.values():
            engine.finalize()
        self._engines.clear()


async def _receive_nothing(engine: CheckpointEngine) -> None:
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            raise RuntimeError(f"{batch[0][0]} came through a bucket")


def _serve(pipe: Connection, rank: int, sets: Mapping[str, Shapes]) -> None:
    end = End(rank, sets)
    while True:
        command, *arguments = pipe.recv()
        if command == "end":
            return
        if command == "answer":
            arguments = [pipe]
        pipe.send(getattr(end, command)(*arguments))


class Ends:
    """Both processes, acquainted.

    Args:
        sets: names and shapes of the tensors, of bfloat16, that each has; those of `model` are
            what NIXL reads bare.
    """

    def __init__(self, sets: Mapping[str, Shapes]) -> None:
        self._pipes, self._processes = spawned(_serve, 2, sets)
        self._policy, agent = self._ask(0, "identify")
        self._ask(1, "meet", agent)
        self._places = {key: self._ask(0, "places", key) for key in ("model", "flat")}

    def ask_both(self, *command: object) -> list[Any]:
        """Let both ends do something at once."""
        for pipe in self._pipes:
            pipe.send(command)
        return [pipe.recv() for pipe in self._pipes]

    def make(self, variant: Variant, key: str) -> None:
        """Make an engine at both ends, to sync these weights."""
        self.ask_both("connect", variant, self.ask_both("prepare", variant))
        self.ask_both("aim", variant, key)

    def sync_s(self, variant: Variant, key: str) -> float:
        """Seconds of a sync."""
        start = time.perf_counter()
        self.ask_both("sync", variant, key)
        return time.perf_counter() - start

    def copy_s(self) -> float:
        """Seconds of a copy of the flat memory."""
        return self._timed("copy")

    def raw_s(self, how: str, key: str) -> float:
        """Seconds of bare reads, while the policy's agent answers: NIXL's first read needs that to
        connect.

        Args:
            how: the rollout worker's method.
        """
        self._pipes[0].send(("answer",))
        took = self._timed(how, self._policy, self._places[key], key)
        self._pipes[0].send(("identify",))
        self._pipes[0].recv()
        self._pipes[0].recv()
        return took

    def close(self) -> None:
        """End both processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(("end",))
            process.join()

    def _timed(self, *command: object) -> float:
        start = time.perf_counter()
        self._ask(1, *command)
        return time.perf_counter() - start

    def _ask(self, rank: int, *command: object) -> Any:
        self._pipes[rank].send(command)
        return self._pipes[rank].recv()
