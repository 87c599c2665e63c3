"""The processes of the conformance suite: rollout workers, each with an engine of its own.

Rules kept here: a worker compares what it gets with what `sample_weights` makes in its own process,
byte for byte, before it asks for the next batch; and Python's collector runs at neither end, as a
trainer may have switched it off: what an engine reserves it gives back itself.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final

import torch

from rollsync.shell.refit.engines.base import CheckpointEngine
from rollsync.shell.refit.engines.conformance_memory import MEMORY_BUCKET_BYTES, Held
from rollsync.shell.refit.engines.factory import create_checkpoint_engine
from rollsync.shell.refit.engines.kept_errors import run_stream

BUCKET_BYTES: Final = 4096
ANSWER_TIMEOUT_S: Final = 60.0
SLOW_S: Final = 0.01

PROCESSES: Final = multiprocessing.get_context("forkserver")
"""A server that has imported torch once: a worker then starts in milliseconds."""
PROCESSES.set_forkserver_preload(["rollsync.shell.refit.engines.conformance_workers"])


def sample_weights() -> dict[str, torch.Tensor]:
    """One tensor of every kind that a stream may hold, the same in every process."""
    random = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    def some_bytes(count: int) -> torch.Tensor:
        return torch.randint(0, 255, (count,), dtype=torch.uint8, generator=random)

    matrix, tied, near = floats(40, 30), floats(30, 50), floats(3, 4)
    weights = {
        "near.first": near,
        "three_bf16": floats(3).to(torch.bfloat16),
        "near.other": floats(3, 4),
        "near.second": near,
        "then_fp32": floats(5),
        "zero_dimensional": torch.tensor(3.5, dtype=torch.float64),
        "no_bytes": torch.empty(0, 7),
        "tied.embedding": tied,
        "transposed": matrix.t(),
        "strided": matrix[::2, 1::3],
        "expanded": floats(1, 4).expand(6, 4),
        "bucket_less_one": some_bytes(BUCKET_BYTES - 1),
        "bucket": some_bytes(BUCKET_BYTES),
        "bucket_and_one": some_bytes(BUCKET_BYTES + 1),
        "three_buckets": floats(3 * BUCKET_BYTES // 4),
        "three_buckets_transposed": floats(64, 3 * BUCKET_BYTES // 256).t(),
        "boolean": torch.tensor([True, False, True]),
        "complex": torch.complex(floats(5), floats(5)),
        "conjugate": torch.complex(floats(5), floats(5)).conj(),
        "tied.output": tied,
    }
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
        weights[str(dtype)] = floats(9).to(dtype)
    for dtype in (torch.uint16, torch.int8, torch.int64):
        weights[str(dtype)] = torch.arange(9).to(dtype)
    return weights


TIED: Final = ("near.first", "near.second", "tied.embedding", "tied.output")
"""Samples that are tied in pairs: a further name may come with the first one."""


def gathered_weights() -> Iterator[tuple[str, torch.Tensor]]:
    """The samples from a trainer that gathers each one into the same memory."""
    memory = torch.empty(4 * BUCKET_BYTES, dtype=torch.uint8)
    for name, tensor in sample_weights().items():
        gathered = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, gathered.copy_(tensor)


@cache
def large_weights() -> dict[str, torch.Tensor]:
    """Three buckets of the tests of memory, in tensors of which the last is larger than one; made
    once, because what a process allocates anew it may not give back."""
    return {
        "large.first": torch.arange(MEMORY_BUCKET_BYTES // 4, dtype=torch.int32),
        "large.last": torch.arange(MEMORY_BUCKET_BYTES // 2, dtype=torch.int32),
    }


class IteratorFailed(Exception):
    """What a failing iterator of weights raises."""


class LoaderFailed(Exception):
    """What a failing loader raises."""


def stream_failing_at(name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The samples up to `name`, and then an error."""
    yield from failing_at(name, sample_weights().items())


def failing_at(
    name: str, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights up to `name`, and then an error."""
    for each, tensor in weights:
        if each == name:
            raise IteratorFailed(f"the trainer lost {name}")
        yield each, tensor


@dataclass(frozen=True)
class Received:
    """What a worker says of one stream."""

    names: tuple[str, ...] = ()
    """Of the tensors that arrived as they were sent, in order."""
    error: str = ""
    """What ended the stream early, in words."""
    error_types: tuple[str, ...] = ()
    """The class of that error and those it derives from."""


@dataclass(frozen=True)
class _Receive:
    loader_fails_at: str
    slow: bool


@dataclass(frozen=True)
class _Connect:
    rank: int
    rollout_world_size: int
    metadata: list[object]


class Rollouts:
    """Rollout workers in processes of their own; this process is the one policy worker.

    Args:
        backend: the engine's name.
        engine_kwargs: its options.
        count: how many rollout workers.
        environments: variables that the first of them have in their environments.
        bucket_bytes: of the engines.
    """

    def __init__(
        self,
        backend: str,
        engine_kwargs: Mapping[str, object],
        count: int,
        environments: Sequence[Mapping[str, str]] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.loader_fails_at = ""
        self.slow_rank = -1
        self.policy = create_checkpoint_engine(
            backend, bucket_size_bytes=bucket_bytes, engine_kwargs=engine_kwargs
        )
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            mine, theirs = PROCESSES.Pipe()
            environment = dict(environments[rank]) if rank < len(environments) else {}
            process = PROCESSES.Process(
                target=_worker,
                args=(theirs, backend, bucket_bytes, dict(engine_kwargs), environment),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def __enter__(self) -> Rollouts:
        self._collects = gc.isenabled()
        gc.disable()
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._collects:
            gc.enable()
        self.policy.finalize()
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()
            process.join()

    def connect(self) -> None:
        """Prepare every engine, and set the process groups up."""
        metadata: list[object] = [self.policy.prepare()]
        metadata += [self._ask(pipe, "prepare") for pipe in self._pipes]
        self.policy.init_policy_process_group(
            worker_rank=0,
            train_world_size=1,
            rollout_world_size=len(self._pipes),
            metadata=metadata,
        )
        for rank, pipe in enumerate(self._pipes):
            self._ask(pipe, _Connect(rank, len(self._pipes), metadata))

    def finalize(self) -> None:
        """Finalize every engine."""
        self.policy.finalize()
        for pipe in self._pipes:
            self._ask(pipe, "finalize")

    def begin(self) -> None:
        """Let every rollout worker receive one stream."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send(_Receive(self.loader_fails_at, rank == self.slow_rank))

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send one stream to workers that receive it."""
        self.begin()
        run_stream(self.policy.send_weights(weights))

    def send_failing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Exception:
        """Send one stream that fails; the error."""
        try:
            self.send(weights)
        except Exception as error:
            return error
        raise AssertionError("the sender took a failed stream for a whole one")

    def answers(self) -> list[Received]:
        """What every worker says of the stream."""
        return [self.answer_of(rank) for rank in range(len(self._pipes))]

    def answer_of(self, rank: int) -> Received:
        """What one worker says of the stream."""
        answer = self._answer(self._pipes[rank])
        if not isinstance(answer, Received):
            raise AssertionError(f"a worker answered {answer}")
        return answer

    def held(self) -> Held:
        """What all processes hold now."""
        total = Held.now()
        for pipe in self._pipes:
            answer = self._ask(pipe, "held")
            if not isinstance(answer, Held):
                raise AssertionError(f"a worker answered {answer}")
            total += answer
        return total

    def _ask(self, pipe: Connection, command: object) -> object:
        pipe.send(command)
        return self._answer(pipe)

    def _answer(self, pipe: Connection) -> object:
        if not pipe.poll(ANSWER_TIMEOUT_S):
            raise AssertionError(f"a rollout worker did not answer for {ANSWER_TIMEOUT_S:g} s")
        answer: object = pipe.recv()
        return answer


def _worker(
    pipe: Connection,
    backend: str,
    bucket_bytes: int,
    engine_kwargs: Mapping[str, object],
    environment: Mapping[str, str],
) -> None:
    gc.disable()
    os.environ.update(environment)
    engine = create_checkpoint_engine(
        backend, bucket_size_bytes=bucket_bytes, engine_kwargs=engine_kwargs
    )
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            break
        if command == "prepare":
            pipe.send(engine.prepare())
        elif command == "finalize":
            engine.finalize()
            pipe.send(None)
        elif command == "held":
            pipe.send(Held.now())
        elif isinstance(command, _Connect):
            engine.init_rollout_process_group(
                rollout_rank=command.rank,
                train_world_size=1,
                rollout_world_size=command.rollout_world_size,
                metadata=command.metadata,
            )
            pipe.send(None)
        elif isinstance(command, _Receive):
            pipe.send(run_stream(_receive(engine, command)))
    engine.finalize()


async def _receive(engine: CheckpointEngine, command: _Receive) -> Received:
    expected = sample_weights() | large_weights()
    names: list[str] = []
    try:
        async with aclosing(engine.receive_weight_batches()) as batches:
            async for batch in batches:
                if command.slow:
                    time.sleep(SLOW_S)
                for name, tensor in batch:
                    if name == command.loader_fails_at:
                        raise LoaderFailed(f"no room for {name}")
                    if not same(expected[name], tensor):
                        return Received(tuple(names), error=f"{name} arrived as {tensor}")
                    names.append(name)
    except Exception as error:
        types = tuple(each.__name__ for each in type(error).__mro__)
        return Received(tuple(names), f"{type(error).__name__}: {error}", types)
    return Received(tuple(names))


def same(sent: torch.Tensor, received: torch.Tensor) -> bool:
    """Whether both have the same dtype, shape and bytes."""
    if sent.dtype != received.dtype or sent.shape != received.shape:
        return False
    one = sent.resolve_conj().contiguous().view(-1).view(torch.uint8)
    return torch.equal(one, received.contiguous().view(-1).view(torch.uint8))
