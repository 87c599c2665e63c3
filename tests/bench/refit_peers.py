"""Every other way that is installed to bring the same weights from one process to another.

All of them load: they copy into tensors that the rollout process has. The exceptions are the memory
copy and the raw NIXL read, which are what a way is held against.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import ray
import torch
import torch.distributed
from safetensors.torch import load_file, save_file

from rollsync.shell.refit.engines.nixl_agent import NixlAgent, memory_of

MIB = 1 << 20
RAW_READ_BYTES = 512 * MIB
RING_BYTES = 24 * MIB
SLICE_BYTES = MIB // 4
COUNTERS_BYTES = 4096
"""In front of the bare ring: how much was filled, and, a cache line on, how much was loaded."""
Weights = dict[str, torch.Tensor]
Reference = ray.ObjectRef[Any]


class Peer:
    """One end of each way: the policy (rank 0) or the rollout process (rank 1).

    Args:
        rank: which.
        directory: in shared memory, and for both ends the same.
        weights: what is sent, or loaded into; equal names and shapes on both ends.
    """

    def __init__(self, rank: int, directory: str, weights: Weights) -> None:
        self._rank = rank
        self._model = weights
        self._file = Path(directory, "model.safetensors")
        self._flat = torch.ones(RAW_READ_BYTES, dtype=torch.uint8)
        self._other = torch.zeros(RAW_READ_BYTES, dtype=torch.uint8)
        self._agent = NixlAgent("UCX", {})
        self._registered = self._agent.register([self._flat])
        self._peer = ""
        self._address = 0
        self._bare = _map_ring(Path(directory, "ring"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=2
            )

    def copy(self) -> None:
        """One memory copy by one thread."""
        self._other.copy_(self._flat)

    def bare_copies(self) -> None:
        """The model through a ring in shared memory, in slices, and nothing but the two copies.

        What an engine does besides: names, whole tensors, checksums, messages.
        """
        ring, counters = self._bare
        filled, loaded = counters[:1], counters[8:9]
        if self._rank == 0:
            filled[0] = loaded[0] = 0
        position = 0
        torch.distributed.barrier()
        for tensor in self._model.values():
            flat = tensor.view(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(flat), SLICE_BYTES):
                own = flat[begin : begin + SLICE_BYTES]
                size = min(len(own), RING_BYTES - position % RING_BYTES)
                if size < len(own):
                    # A slice is not cut at the ring's end: what is left of it stays empty.
                    position += size
                place = position % RING_BYTES
                position += len(own)
                if self._rank == 0:
                    while position - loaded[0] > RING_BYTES:
                        pass
                    ring[place : place + len(own)] = own
                    filled[0] = position
                else:
                    while filled[0] < position:
                        pass
                    own[:] = ring[place : place + len(own)]
                    loaded[0] = position

    def broadcast(self) -> None:
        """The model over gloo, tensor by tensor."""
        for tensor in self._model.values():
            if self._rank == 0:
                torch.distributed.broadcast(tensor, src=0)
            else:
                received = torch.empty_like(tensor)
                torch.distributed.broadcast(received, src=0)
                tensor.copy_(received)

    def put(self) -> list[Reference]:
        """The model into Ray's object store, as one object."""
        arrays = {n: t.view(torch.int16).numpy() for n, t in self._model.items()}
        return [ray.put(arrays)]

    def get(self, references: list[Reference]) -> None:
        """The model out of Ray's object store, loaded."""
        arrays = ray.get(references[0])
        with warnings.catch_warnings():
            # What Ray gives cannot be written to; it is only read here.
            warnings.simplefilter("ignore")
            for name, tensor in self._model.items():
                tensor.copy_(torch.from_numpy(arrays[name]).view(torch.bfloat16))

    def tensors(self) -> list[torch.Tensor]:
        """The model, for Ray to bring over in one of its tensor transports."""
        return list(self._model.values())

    def load(self, tensors: list[torch.Tensor]) -> None:
        """What Ray brought, loaded."""
        for tensor, received in zip(self._model.values(), tensors, strict=True):
            tensor.copy_(received)

    def save(self) -> Path:
        """The model into a file in shared memory; which."""
        save_file(self._model, self._file)
        return self._file

    def load_saved(self, file: Path) -> None:
        """The model from such a file, loaded."""
        for name, received in load_file(file).items():
            self._model[name].copy_(received)
        file.unlink()

    def offer(self) -> tuple[bytes, int]:
        """Where the raw read reads from."""
        return self._agent.metadata, self._flat.data_ptr()

    def meet(self, offered: tuple[bytes, int]) -> None:
        """Learn where to read from."""
        self._peer, self._address = self._agent.meet(offered[0]), offered[1]

    def serve(self, seconds: float) -> None:
        """Answer the reader."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._agent.progress()
            time.sleep(0.0002)

    def raw_read(self) -> None:
        """One NIXL read of one descriptor."""
        kind, device = memory_of(self._flat)
        read = self._agent.read(self._peer, (self._address, device, kind), self._flat)
        while not read.is_done():
            pass
        read.release()


def _map_ring(path: Path) -> tuple[memoryview, numpy.ndarray[Any, numpy.dtype[numpy.int64]]]:
    """The bare ring and its counters, shared by all who map that file."""
    size = COUNTERS_BYTES + RING_BYTES
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        memory = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    finally:
        os.close(descriptor)
    counters = numpy.frombuffer(memory[:COUNTERS_BYTES], dtype=numpy.int64)
    return memory[COUNTERS_BYTES:], counters
