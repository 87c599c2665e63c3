"""What a receiver reads straight from the policy's memory into its parameters, beside the copy
that this comes down to: a memory copy by one thread, and one read of flat memory, by the kernel or
over NIXL. All memory is of ordinary pages.

Two processes, a core each; each way runs once a round. Called by `bench_refit`.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollsync.pure.refit.control import Destination
from rollsync.pure.refit.load_plan import Copy, Region
from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.direct import Destinations, DirectEngine
from rollsync.shell.refit.engines.nixl_agent import NixlAgent, memory_of
from rollsync.shell.refit.engines.process_memory import read_memory
from rollsync.shell.refit.weights import dtype_name

ROUNDS = 5
MIB = 1 << 20
FLAT_BYTES = 512 * MIB
BUCKET_MIB = 12
SERVED_S = 3.0
_PR_SET_PTRACER = 0x59616D61
COPY = "memory copy in a process of its own"
RAW = {"shm": "raw process_vm_readv", "nixl": "raw NIXL read in a process of its own"}
Shapes = Sequence[tuple[str, tuple[int, ...]]]


class End:
    """The policy (rank 0) or the rollout worker (rank 1)."""

    def __init__(self, rank: int, sets: dict[str, Shapes]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
        # Where siblings may not read each other's memory, the raw read may.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_long(-1), 0, 0, 0)
        self._rank = rank
        self._weights = {
            key: {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes}
            for key, shapes in sets.items()
        }
        self._flat = torch.ones(FLAT_BYTES, dtype=torch.uint8)
        self._other = torch.zeros(FLAT_BYTES, dtype=torch.uint8)
        self._engine: CheckpointEngine | None = None
        self._agent = NixlAgent("UCX", {})
        self._agent.register([self._flat, self._other])
        self._peer = ""

    def place(self) -> tuple[int, int, bytes]:
        """This process, where its flat memory is, and its agent."""
        return os.getpid(), self._flat.data_ptr(), self._agent.metadata

    def meet(self, agent: bytes) -> None:
        """Learn of the other end's agent."""
        self._peer = self._agent.meet(agent)

    def copy(self) -> None:
        """Copy the flat memory."""
        self._other.copy_(self._flat)

    def raw_read(self, process: int, address: int) -> None:
        """Read the other end's flat memory."""
        read_memory(process, [address, FLAT_BYTES], [self._other.data_ptr(), FLAT_BYTES])

    def addresses(self, key: str) -> list[int]:
        """Where the weights are."""
        return [each.data_ptr() for each in self._weights[key].values()]

    def raw_weights(self, process: int, addresses: list[int], key: str) -> None:
        """Read the other end's weights, each by one call, into this one's."""
        for address, each in zip(addresses, self._weights[key].values(), strict=True):
            size = each.nbytes
            read_memory(process, [address, size], [each.data_ptr(), size])

    def serve(self, seconds: float) -> None:
        """Answer the other end's agent."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._agent.progress()
            time.sleep(0.0002)

    def raw_nixl_read(self, address: int) -> None:
        """Read the other end's flat memory over NIXL, in one descriptor."""
        kind, device = memory_of(self._flat)
        read = self._agent.read(self._peer, (address, device, kind), self._other)
        while not read.is_done():
            pass
        read.release()

    def prepare(self, backend: str, checksum: bool) -> dict[str, object]:
        """Make an engine; its metadata."""
        self._engine = create_checkpoint_engine(
            backend,
            bucket_size_bytes=BUCKET_MIB * MIB,
            engine_kwargs={"checksum": checksum, "direct": True},
        )
        return self._engine.prepare()

    def connect(self, metadata: list[object], key: str) -> None:
        """Let the engine know the other end, and where to read to."""
        engine = self._made()
        worlds = {"train_world_size": 1, "rollout_world_size": 1}
        if self._rank == 0:
            engine.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
            return
        engine.init_rollout_process_group(rollout_rank=0, metadata=metadata, **worlds)
        if isinstance(engine, DirectEngine):
            engine.read_into(destinations_to(self._weights[key]))

    def sync(self, key: str) -> None:
        """One stream, nothing of which comes in batches."""
        engine = self._made()
        if self._rank == 0:
            asyncio.run(engine.send_weights(self._weights[key].items()))
        else:
            asyncio.run(_receive_nothing(engine))

    def finalize(self) -> None:
        """Give the engine back."""
        self._made().finalize()

    def _made(self) -> CheckpointEngine:
        if self._engine is None:
            raise RuntimeError("call prepare first")
        return self._engine


async def _receive_nothing(engine: CheckpointEngine) -> None:
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            raise RuntimeError(f"{batch[0][0]} came through a bucket")


def destinations_to(parameters: dict[str, torch.Tensor]) -> Destinations:
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


def _serve(pipe: Connection, rank: int, sets: dict[str, Shapes]) -> None:
    end = End(rank, sets)
    while True:
        command, *arguments = pipe.recv()
        if command == "end":
            return
        pipe.send(getattr(end, command)(*arguments))


class _Ends:
    """Both processes."""

    def __init__(self, sets: dict[str, Shapes]) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in (0, 1):
            mine, theirs = spawning.Pipe()
            process = spawning.Process(target=_serve, args=(theirs, rank, sets), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def ask(self, rank: int, *command: object) -> Any:
        """Let one end do something."""
        self._pipes[rank].send(command)
        return self._pipes[rank].recv()

    def acquaint(self) -> tuple[int, int]:
        """Let the rollout worker know the policy's agent; the policy's process, and where its flat
        memory is."""
        process, address, agent = self.ask(0, "place")
        self.ask(1, "meet", agent)
        self.raw_nixl_read_s(address)
        return process, address

    def raw_nixl_read_s(self, address: int) -> float:
        """Seconds of one read over NIXL, while the policy's agent answers: a read may need that at
        any time, and not only the first, to connect."""
        self._pipes[0].send(("serve", SERVED_S))
        start = time.perf_counter()
        self.ask(1, "raw_nixl_read", address)
        took = time.perf_counter() - start
        self._pipes[0].recv()
        return took

    def ask_both(self, *command: object) -> list[Any]:
        """Let both ends do something at once."""
        for pipe in self._pipes:
            pipe.send(command)
        return [pipe.recv() for pipe in self._pipes]

    def sync_s(self, backend: str, key: str, *, checksum: bool) -> float:
        """Seconds of a sync, after one that sets the connection up."""
        metadata = self.ask_both("prepare", backend, checksum)
        self.ask_both("connect", metadata, key)
        self.ask_both("sync", key)
        start = time.perf_counter()
        self.ask_both("sync", key)
        took = time.perf_counter() - start
        self.ask_both("finalize")
        return took

    def close(self) -> None:
        """End both processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(("end",))
            process.join()


def direct_rows(model: Shapes, small: Shapes) -> list[dict[str, object]]:
    """The figures of the direct way.

    Args:
        model: names and shapes of a model's tensors, of bfloat16.
        small: many small ones.
    """
    ends = _Ends({"model": model, "small": small})
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    process, address = ends.acquaint()
    raw: dict[str, tuple[object, ...]] = {
        COPY: ("copy",),
        RAW["shm"]: ("raw_read", process, address),
    }
    for _ in range(ROUNDS + 1):
        for name, command in raw.items():
            start = time.perf_counter()
            ends.ask(1, *command)
            note(name, time.perf_counter() - start)
        note(RAW["nixl"], ends.raw_nixl_read_s(address))
        for backend in RAW:
            name = f"{backend} direct"
            note(name, ends.sync_s(backend, "model", checksum=True))
            note(f"{name}, without checksums", ends.sync_s(backend, "model", checksum=False))
            note(f"{name}, small tensors", ends.sync_s(backend, "small", checksum=True))
    ends.close()
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}
    each_us = {
        backend: seconds.pop(f"{backend} direct, small tensors") / len(small) * 1e6
        for backend in RAW
    }
    moved = sum(2 * torch.Size(shape).numel() for _, shape in model)
    rate = {
        name: (FLAT_BYTES if name in raw else moved) / value / 1e9
        for name, value in seconds.items()
    }
    result = [_row(name, value, "GB/s") for name, value in rate.items()]
    for backend in RAW:
        for name in (f"{backend} direct", f"{backend} direct, without checksums"):
            for against, goal in ((RAW[backend], 0.9), (COPY, None)):
                ratio = rate[name] / rate[against]
                result.append(
                    _row(name, rate[name], "GB/s", against=against, ratio=ratio, goal=goal)
                )
    result += [
        _row(f"{backend} direct, small tensors, both ends", value, "microseconds a tensor")
        for backend, value in each_us.items()
    ]
    return result


def _row(
    name: str,
    value: float,
    unit: str,
    *,
    against: str | None = None,
    ratio: float | None = None,
    goal: float | None = None,
) -> dict[str, object]:
    return {
        "name": name,
        "value": round(value, 2),
        "unit": unit,
        "compared_with": against,
        "ratio": None if ratio is None else round(ratio, 2),
        "goal": goal,
        "met": None if goal is None or ratio is None else ratio >= goal,
    }
