"""Weights from one process to another, against every other way that is installed.

1 GiB of bfloat16 in the tensor shapes of a Qwen2.5-0.5B stack, from a policy process on one core
to a rollout process on another, which loads every tensor into memory of its own. In each round all
ways run once, one after the other, so that they meet the same load. Ratios are of median rates.

The other ways are in `refit_peers`, reads straight into parameters in `refit_direct`, and relays in
`refit_relays`. The memory copy is of one thread in the policy process; the one on both cores is
such a copy in each process at a time. The bare copies are what a way with buffers in shared memory
cannot be faster than.

"Layers" is the model without its embedding, of which every tensor fits the buffers; larger and
smaller models of the same shapes show how the time grows.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import ray
import torch
from ray.experimental.collective import create_collective_group

from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from tests.bench.measure import machine, write_results
from tests.bench.refit_direct import direct_rows
from tests.bench.refit_peers import MIB, RAW_READ_BYTES, Peer, Reference, Weights
from tests.bench.refit_relays import relay_rows
from tests.bench.refit_stream import connect, stream

ROUNDS = 3
BUCKETS_MIB = (1, 4, 8, 12, 64)
VARIANT_MIB = 12
"""Two such buckets hold two of the model's largest matrices; variants are measured with these."""
GROWTH_MIB = (64, 256, 1024, 4096)
SMALL_TENSORS = 50_000
BOTH_CORES = "memory copies on both cores"
ONE_TENSOR, MANY_TENSORS = PER_TENSOR = ("shm, one tensor", "shm, small tensors")
BARE = "bare copies through shared memory"
Shapes = list[tuple[str, tuple[int, ...]]]


def qwen_shapes(total_bytes: int, *, embedding: bool = True) -> Shapes:
    """Layers of Qwen2.5-0.5B after its embedding, until `total_bytes` of bfloat16."""
    hidden, inner, kv = 896, 4864, 128
    layer: Shapes = [
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("self_attn.q_proj.bias", (hidden,)),
        ("self_attn.k_proj.weight", (kv, hidden)),
        ("self_attn.k_proj.bias", (kv,)),
        ("self_attn.v_proj.weight", (kv, hidden)),
        ("self_attn.v_proj.bias", (kv,)),
        ("self_attn.o_proj.weight", (hidden, hidden)),
        ("mlp.gate_proj.weight", (inner, hidden)),
        ("mlp.up_proj.weight", (inner, hidden)),
        ("mlp.down_proj.weight", (hidden, inner)),
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
    ]
    shapes: Shapes = [("model.embed_tokens.weight", (151_936, hidden))] if embedding else []
    number = 0
    while bytes_of(shapes) < total_bytes:
        shapes += [(f"model.layers.{number}.{name}", shape) for name, shape in layer]
        number += 1
    return shapes


def bytes_of(shapes: Shapes) -> int:
    """Their bytes in bfloat16."""
    return sum(2 * torch.Size(shape).numel() for _, shape in shapes)


SETS: dict[str, Shapes] = {
    "model": qwen_shapes(1024 * MIB),
    "layers": qwen_shapes(1024 * MIB, embedding=False),
    "one tensor": [("weight", (1024,))],
    "small tensors": [(f"layers.{number}.weight", (512,)) for number in range(SMALL_TENSORS)],
}


class Worker(Peer):
    """One end: the policy (rank 0) or the rollout worker (rank 1), on a core of its own."""

    def __init__(self, rank: int, directory: str) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
        self._engine: CheckpointEngine | None = None
        self._weights = {
            key: {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes}
            for key, shapes in SETS.items()
        }
        self._growing: Weights = {}
        super().__init__(rank, directory, self._weights["model"])

    def prepare(self, backend: str, bucket_bytes: int, checksum: bool) -> dict[str, object]:
        """Make an engine; its metadata."""
        self.finalize()
        self._engine = create_checkpoint_engine(
            backend, bucket_size_bytes=bucket_bytes, engine_kwargs={"checksum": checksum}
        )
        return self._engine.prepare()

    def connect(self, metadata: Sequence[object]) -> None:
        """Let the engine know the other end."""
        connect(self._made(), self._rank, metadata)

    def sync(self, key: str) -> float:
        """One stream; seconds of processor time that it took here."""
        weights = self._weights.get(key, self._growing)
        before = time.process_time()
        asyncio.run(stream(self._made(), self._rank, weights))
        return time.process_time() - before

    def grow(self, mib: int) -> None:
        """Make layers of so many MiB; those of before go. None are left at 0 MiB."""
        self._growing.clear()
        if mib:
            shapes = qwen_shapes(mib * MIB, embedding=False)
            self._growing = {n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes}

    def resident_bytes(self) -> int:
        """Memory of this process, its part of what is shared."""
        return psutil.Process().memory_full_info().pss

    def finalize(self) -> None:
        """Give the engine back."""
        if self._engine is not None:
            self._engine.finalize()
            self._engine = None

    def _made(self) -> CheckpointEngine:
        if self._engine is None:
            raise RuntimeError("call prepare first")
        return self._engine


@dataclass
class Times:
    """Seconds of one way: by the clock, and of each end's processor."""

    wall_s: list[float] = field(default_factory=list)
    sender_s: list[float] = field(default_factory=list)
    receiver_s: list[float] = field(default_factory=list)
    reserved_bytes: list[int] = field(default_factory=list)


def timed(action: Callable[[], list[Reference]], times: Times) -> None:
    """Run once; `action` starts both ends and gives what to wait for."""
    start = time.perf_counter()
    ended = ray.get(action())
    times.wall_s.append(time.perf_counter() - start)
    if isinstance(ended[0], float) and isinstance(ended[-1], float):
        times.sender_s.append(ended[0])
        times.receiver_s.append(ended[-1])


Workers = list[Any]
"""Handles, whose methods are called by name."""


def bring(workers: Workers, transport: str) -> list[Reference]:
    """The model by one of Ray's own transports of tensors."""
    policy, rollout = workers
    return [rollout.load.remote(policy.tensors.options(tensor_transport=transport).remote())]


def measure_engine(
    workers: Workers, backend: str, mib: int, key: str, times: Times, *, checksum: bool = True
) -> None:
    """One sync of an engine, after one that is not counted: it sets the connection up."""
    before: list[int] = ray.get([worker.resident_bytes.remote() for worker in workers])
    metadata: list[object] = ray.get(
        [worker.prepare.remote(backend, mib * MIB, checksum) for worker in workers]
    )
    ray.get([worker.connect.remote(metadata) for worker in workers])
    for counted in (Times(), times):
        timed(lambda: [worker.sync.remote(key) for worker in workers], counted)
    after: list[int] = ray.get([worker.resident_bytes.remote() for worker in workers])
    times.reserved_bytes.append(sum(after) - sum(before))
    ray.get([worker.finalize.remote() for worker in workers])


def measure_transport(transport: str, times: Times) -> None:
    """One of Ray's own transports of tensors, between processes that do nothing else: its NIXL
    agent has a thread that never rests."""
    # Ray's own types do not name the option.
    decorate: Any = ray.remote
    remote = decorate(num_cpus=0, enable_tensor_transport=True)(Worker)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        workers: Workers = [remote.remote(rank, directory) for rank in (0, 1)]
        if transport == "gloo":
            create_collective_group(workers, backend="gloo")
        for _ in range(ROUNDS + 1):
            timed(partial(bring, workers, transport), times)
        for worker in workers:
            ray.kill(worker)


def measure_all() -> dict[str, Times]:
    """Every way, in turn."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        remote: Any = ray.remote(num_cpus=0)(Worker)
        workers: Workers = [remote.remote(rank, directory) for rank in (0, 1)]
        policy, rollout = workers
        ray.get(rollout.meet.remote(ray.get(policy.offer.remote())))
        found: dict[str, Times] = {}

        def of(name: str) -> Times:
            return found.setdefault(name, Times())

        for _ in range(ROUNDS + 1):
            timed(lambda: [policy.copy.remote()], of("memory copy"))
            timed(lambda: [worker.copy.remote() for worker in workers], of(BOTH_CORES))
            serving = policy.serve.remote(1.0)
            timed(lambda: [rollout.raw_read.remote()], of("raw NIXL read"))
            ray.get(serving)
            timed(lambda: [worker.broadcast.remote() for worker in workers], of("gloo broadcast"))
            timed(lambda: [rollout.get.remote(policy.put.remote())], of("Ray object store"))
            timed(lambda: [worker.bare_copies.remote() for worker in workers], of(BARE))
            saved = of("safetensors file in shared memory")
            timed(lambda: [rollout.load_saved.remote(policy.save.remote())], saved)
            for backend in ("shm", "nixl"):
                for mib in BUCKETS_MIB:
                    name = f"{backend}, {mib} MiB buckets"
                    measure_engine(workers, backend, mib, "model", of(name))
                for what in ("model", "layers"):
                    name = f"{backend}, {VARIANT_MIB} MiB buckets, {what}"
                    without = of(f"{name}, without checksums")
                    measure_engine(workers, backend, VARIANT_MIB, what, without, checksum=False)
                name = f"{backend}, {VARIANT_MIB} MiB buckets, layers"
                measure_engine(workers, backend, VARIANT_MIB, "layers", of(name))
            measure_engine(workers, "shm", 4, "one tensor", of(ONE_TENSOR))
            measure_engine(workers, "shm", 4, "small tensors", of(MANY_TENSORS))
        for mib in GROWTH_MIB:
            ray.get([worker.grow.remote(mib) for worker in workers])
            for _ in range(ROUNDS + 1):
                measure_engine(
                    workers, "shm", VARIANT_MIB, "grown", of(f"shm, {mib} MiB of layers")
                )
            ray.get([worker.grow.remote(0) for worker in workers])
        for worker in workers:
            ray.kill(worker)
    for transport in ("gloo", "nixl"):
        measure_transport(transport, of(f"Ray Direct Transport, {transport}"))
    return found


Row = dict[str, object]


def moved_bytes(name: str) -> int:
    """How much one run of a way moves."""
    if name in ("memory copy", "raw NIXL read"):
        return RAW_READ_BYTES
    if name == BOTH_CORES:
        return 2 * RAW_READ_BYTES
    if name.endswith("MiB of layers"):
        return bytes_of(qwen_shapes(int(name.split()[1]) * MIB, embedding=False))
    return bytes_of(SETS["layers" if "layers" in name else "model"])


def compared(name: str, rate: dict[str, float], against: str, goal: float | None) -> Row:
    """A rate beside another."""
    ratio = rate[name] / rate[against]
    return {
        "name": name,
        "value": round(rate[name], 2),
        "unit": "GB/s",
        "compared_with": against,
        "ratio": round(ratio, 2),
        "goal": goal,
        "met": None if goal is None else ratio >= goal,
    }


def rows(found: dict[str, Times]) -> list[Row]:
    """The figures and whether they meet the goals."""
    rate = {
        name: moved_bytes(name) / statistics.median(times.wall_s[1:]) / 1e9
        for name, times in found.items()
        if name not in PER_TENSOR
    }
    result: list[Row] = [
        {"name": name, "value": round(value, 2), "unit": "GB/s"} for name, value in rate.items()
    ]
    for backend, against, goal in (
        ("shm", "memory copy", 0.85),
        ("shm", "Ray object store", 2.0),
        ("shm", BARE, None),
        ("shm", "gloo broadcast", None),
        ("shm", "Ray Direct Transport, nixl", None),
        ("shm", "safetensors file in shared memory", None),
        ("nixl", "raw NIXL read", 0.6),
    ):
        plain = [f"{backend}, {mib} MiB buckets" for mib in BUCKETS_MIB]
        result.append(compared(max(plain, key=lambda name: rate[name]), rate, against, goal))
        result += [
            compared(name, rate, against, None)
            for name in rate
            if name.startswith(f"{backend}, {VARIANT_MIB} MiB buckets, ")
        ]
    smallest, largest = (f"shm, {mib} MiB of layers" for mib in (GROWTH_MIB[0], GROWTH_MIB[-1]))
    result.append(compared(largest, rate, smallest, None))
    return [
        {"compared_with": None, "ratio": None, "goal": None, "met": None, **row}
        for row in result + memory_rows(found) + tensor_rows(found)
    ]


def memory_rows(found: dict[str, Times]) -> list[Row]:
    """What an engine reserves on both ends together, with what it assembles tensors in."""
    return [
        {
            "name": f"{name}, reserved on both ends",
            "value": round(statistics.median(times.reserved_bytes[1:]) / MIB, 1),
            "unit": "MiB",
        }
        for name, times in found.items()
        if times.reserved_bytes and name not in PER_TENSOR
    ]


def tensor_rows(found: dict[str, Times]) -> list[Row]:
    """What one tensor costs, alone and among many."""
    one = statistics.median(found[ONE_TENSOR].wall_s[1:]) * 1e3
    small = found[MANY_TENSORS]
    result: list[Row] = [
        {
            "name": "shm, one tensor",
            "value": round(one, 2),
            "unit": "ms",
            "goal": 5,
            "met": one <= 5,
        }
    ]
    for what, unit, seconds in (
        ("both ends", "microseconds a tensor", small.wall_s),
        ("sender", "microseconds of processor time a tensor", small.sender_s),
        ("receiver", "microseconds of processor time a tensor", small.receiver_s),
    ):
        each = statistics.median(seconds[1:]) / SMALL_TENSORS * 1e6
        result.append(
            {
                "name": f"shm, small tensors, {what}",
                "value": round(each, 2),
                "unit": unit,
                "goal": 10,
                "met": each <= 10,
            }
        )
    return result


if __name__ == "__main__":
    ray.init(num_cpus=2, object_store_memory=3 << 30, include_dashboard=False, log_to_driver=False)
    measured = rows(measure_all())
    ray.shutdown()
    measured += direct_rows(SETS["model"], SETS["small tensors"])
    measured += relay_rows(SETS["model"])
    write_results(
        {
            "machine": {
                **machine(["torch", "ray", "nixl-cu12", "xxhash"]),
                "load_average": os.getloadavg()[0],
            },
            "rounds": ROUNDS,
            "figures": measured,
        }
    )
