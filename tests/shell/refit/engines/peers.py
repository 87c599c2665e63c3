"""Two ends of a stream as real processes, either of which dies at a given moment."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

import torch

from rollsync.pure.refit.control import Destination
from rollsync.pure.refit.load_plan import Copy, Region
from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.conformance_workers import BUCKET_BYTES, sample_weights
from rollsync.shell.refit.engines.direct import Destinations, DirectEngine
from rollsync.shell.refit.weights import dtype_name
from tests.shell.refit.engines.moments import BEFORE_IT, NEVER, Death, arrange

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.shell.refit.engines.peers"])


def engine_of(backend: str, timeout_s: float, *, direct: bool = False) -> CheckpointEngine:
    """An engine of the samples' bucket size."""
    return create_checkpoint_engine(
        backend,
        bucket_size_bytes=BUCKET_BYTES,
        engine_kwargs={
            "refit_timeout_s": timeout_s,
            **({"direct": True} if direct else {}),
        },
    )


def samples_told_to(death: Death) -> Iterator[tuple[str, torch.Tensor]]:
    """The samples, each of which is a moment, and so is their end."""
    for name, tensor in sample_weights().items():
        death.moment(f"makes {name}")
        yield name, tensor
    death.moment("makes the end")


DIRECT: Final = ("three_bf16", "then_fp32", "bucket_and_one", "three_buckets")
"""Samples that a direct receiver reads into parameters of the same names."""


def read_samples_into(engine: CheckpointEngine) -> dict[str, torch.Tensor]:
    """Let an engine read the direct samples; the parameters, all zero."""
    if not isinstance(engine, DirectEngine):
        raise AssertionError(f"{engine} reads nothing directly")
    samples = {name: sample_weights()[name] for name in DIRECT}
    parameters = {name: torch.zeros_like(tensor) for name, tensor in samples.items()}
    whole = {name: Region(0, tensor.nbytes) for name, tensor in samples.items()}
    engine.read_into(
        Destinations(
            [
                Destination(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=dtype_name(tensor.dtype),
                    regions=(whole[name],),
                )
                for name, tensor in samples.items()
            ],
            {name: [Copy(whole[name], name, whole[name])] for name in samples},
            parameters,
        )
    )
    return parameters


async def receive_all(engine: CheckpointEngine, death: Death | None = None) -> list[str]:
    """The names of one stream; each is a moment."""
    names: list[str] = []
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            for name, _ in batch:
                if death is not None:
                    death.moment(f"loads {name}")
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


def _none() -> None:
    """No habit."""


def _peer(
    pipe: Connection,
    backend: str,
    role: str,
    timeout_s: float,
    die: str,
    direct: bool,
    habit: Callable[[], None],
) -> None:
    engine = engine_of(backend, timeout_s, direct=direct)
    pipe.send(engine.prepare())
    _connect_as(engine, role, pipe.recv())
    if direct and role == "rollout":
        read_samples_into(engine)
    pipe.send("connected")
    habit()
    death = Death(die)
    arrange(death)
    death.moment(BEFORE_IT)
    if role == "policy":
        asyncio.run(engine.send_weights(samples_told_to(death)))
    else:
        asyncio.run(receive_all(engine, death))
    pipe.send("done")
    engine.finalize()


@cache
def warm_up(backend: str) -> None:
    """Loads once what stays with this process: the server of processes, and the backend."""
    process = PROCESSES.Process(target=int)
    process.start()
    process.join()
    process.close()
    engine = engine_of(backend, 1.0)
    engine.prepare()
    engine.finalize()


class Peer:
    """The other end of this process's engine, in a process of its own, for one stream.

    Args:
        mine: this process's engine.
        role: the other end's, `policy` or `rollout`.
        timeout_s: how long the other end waits for this one.
        die: the moment at which it dies.
        direct: whether it reads, or lets read, the direct samples.
        habit: called in it before the stream.
    """

    def __init__(
        self,
        mine: CheckpointEngine,
        *,
        backend: str,
        role: str,
        timeout_s: float,
        die: str = NEVER,
        direct: bool = False,
        habit: Callable[[], None] = _none,
    ) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process: BaseProcess = PROCESSES.Process(
            target=_peer,
            args=(theirs, backend, role, timeout_s, die, direct, habit),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.other_role = "rollout" if role == "policy" else "policy"
        self.metadata: dict[str, object] = self.pipe.recv()
        metadata: list[object] = [mine.prepare(), self.metadata]
        if role == "policy":
            metadata.reverse()
        self.pipe.send(metadata)
        _connect_as(mine, self.other_role, metadata)
        self._hear("connected")

    def wait_until_done(self) -> None:
        """Wait until it has got to the end of the stream."""
        self._hear("done")

    def wait_until_killed(self) -> None:
        """Wait for its death, which was of its own hand."""
        self.process.join(30)
        if self.process.exitcode != -signal.SIGKILL:
            raise AssertionError(f"the other end ended with {self.process.exitcode}")

    def _hear(self, word: str) -> None:
        # Not an assert, which would be left out of this module when Python optimizes.
        if not self.pipe.poll(30):
            raise AssertionError("the other end says nothing")
        said = self.pipe.recv()
        if said != word:
            raise AssertionError(f"the other end said {said}")

    def close(self) -> None:
        """End it, however far it came."""
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.process.close()
