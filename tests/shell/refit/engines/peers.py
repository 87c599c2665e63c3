"""Two ends of a stream as real processes, either of which kills itself at a given tensor."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.conformance_workers import BUCKET_BYTES, sample_weights

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.shell.refit.engines.peers"])

AT_THE_END = "the end of the stream"
BEFORE_IT = "before the stream"
NEVER = ""


def engine_of(backend: str, timeout_s: float) -> CheckpointEngine:
    """An engine of the samples' bucket size."""
    return create_checkpoint_engine(
        backend, bucket_size_bytes=BUCKET_BYTES, engine_kwargs={"refit_timeout_s": timeout_s}
    )


def die_at(here: str, at: str) -> None:
    """End this process at once, as the kernel's out-of-memory killer does."""
    if here == at:
        os.kill(os.getpid(), signal.SIGKILL)


def weights_dying_at(at: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The samples; the process dies where it would make the one of that name."""
    for name, tensor in sample_weights().items():
        die_at(name, at)
        yield name, tensor
    die_at(AT_THE_END, at)


async def receive_all(engine: CheckpointEngine, die: str = NEVER) -> list[str]:
    """The names of one stream; the process dies where it would load the one of that name."""
    names: list[str] = []
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            for name, _ in batch:
                die_at(name, die)
                names.append(name)
    return names


def _connect_as(engine: CheckpointEngine, role: str, metadata: list[object]) -> None:
    if role == "policy":
        engine.init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )
    else:
        engine.init_rollout_process_group(
            rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )


def _peer(pipe: Connection, backend: str, role: str, timeout_s: float, die: str) -> None:
    engine = engine_of(backend, timeout_s)
    pipe.send(engine.prepare())
    _connect_as(engine, role, pipe.recv())
    pipe.send("connected")
    die_at(BEFORE_IT, die)
    if role == "policy":
        asyncio.run(engine.send_weights(weights_dying_at(die)))
    else:
        asyncio.run(receive_all(engine, die))
    pipe.send("done")
    engine.finalize()


class Peer:
    """The other end of this process's engine, in a process of its own, for one stream.

    Args:
        mine: this process's engine.
        role: the other end's, `policy` or `rollout`.
        die: where it dies.
    """

    def __init__(
        self, mine: CheckpointEngine, *, backend: str, role: str, timeout_s: float, die: str
    ) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process: BaseProcess = PROCESSES.Process(
            target=_peer, args=(theirs, backend, role, timeout_s, die), daemon=True
        )
        self.process.start()
        theirs.close()
        self.other_role = "rollout" if role == "policy" else "policy"
        metadata: list[object] = [mine.prepare(), self.pipe.recv()]
        if role == "policy":
            metadata.reverse()
        self.pipe.send(metadata)
        _connect_as(mine, self.other_role, metadata)
        assert self.pipe.recv() == "connected"

    def finished(self) -> bool:
        """Whether it got to the end of the stream."""
        assert self.pipe.poll(30)
        return bool(self.pipe.recv() == "done")

    def wait_until_killed(self) -> None:
        """Wait for its death, which was of its own hand."""
        self.process.join(30)
        assert self.process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        """End it, however far it came."""
        self.pipe.close()
        self.process.kill()
        self.process.join()
