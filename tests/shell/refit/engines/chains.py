"""One policy worker and a chain of rollout workers, in processes of their own, that stay for many
streams; any of them dies, or fails, at a given moment of one.

As far as the engines can tell, each process is on a host of its own, unless it is told otherwise.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.layout import Part, plan_parts
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.base import Batch, DeclaringEngine
from rollsync.shell.refit.engines.conformance_workers import BUCKET_BYTES, same, sample_weights
from rollsync.shell.refit.engines.errors import TransferError
from rollsync.shell.refit.engines.metadata import HOST_LABEL
from tests.shell.refit.engines.footprint import Footprint
from tests.shell.refit.engines.moments import BEFORE_IT, NEVER, Death, arrange
from tests.shell.refit.engines.peers import PROCESSES

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Order:
    """What a member does in one stream, beside taking part in it.

    Attributes:
        die: the moment at which it dies.
        fail: the tensor at which its iterator or loader fails.
        stick: the tensor at which its loader sleeps, and for how many seconds.
        declared: what it declares.
        layout: what it keeps of that.
    """

    die: str = NEVER
    fail: str = ""
    stick: tuple[str, float] = ("", 0.0)
    declared: tuple[TensorSpec, ...] | None = None
    layout: tuple[Part, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one stream for one member.

    Attributes:
        came: the names of what came as it was sent, in order; of parts, if it came in parts.
        wrong: the names of what did not come as it was sent.
        error: what it raised, in words.
        kind: the name of that error's class; empty when there was none.
        is_transfer: whether it is a `TransferError`.
        died: whether the process ended.
    """

    came: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    error: str = ""
    kind: str = ""
    is_transfer: bool = False
    died: bool = False

    @property
    def names(self) -> list[str]:
        """What came as it was sent, if nothing else did."""
        return [] if self.wrong else sorted(self.came)


class MemberFailed(Exception):
    """What a member's iterator or loader raises on demand."""


class Chain:
    """The members: the policy worker first.

    Args:
        hosts: the name of each member's host.
        backend: the engine.
        timeout_s: how long one wait may take.
        options: further options of the engine.
    """

    def __init__(
        self,
        hosts: Sequence[str] = ("p", "a", "b", "c"),
        *,
        backend: str = "nixl",
        timeout_s: float = 10_000.0,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self._hosts = hosts
        self._backend = backend
        self._options = {"relay": True, "refit_timeout_s": timeout_s, **(options or {})}
        self._members: list[tuple[Connection, BaseProcess] | None] = [None] * len(hosts)

    def __enter__(self) -> Chain:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in range(len(self._hosts)):
            self._bury(member)

    def connect(self) -> None:
        """Set all up anew, and start those that died."""
        for index, host in enumerate(self._hosts):
            if self._members[index] is None:
                mine, theirs = PROCESSES.Pipe()
                process = PROCESSES.Process(
                    target=_member, args=(theirs, host, self._backend, self._options), daemon=True
                )
                process.start()
                theirs.close()
                self._members[index] = (mine, process)
        metadata = self._ask_all(["prepare"] * len(self._hosts))
        self._ask_all([(index, metadata) for index in range(len(self._hosts))])

    def stream(self, orders: Mapping[int, Order] | None = None) -> list[Outcome]:
        """Send one stream through the chain; what became of it for each member."""
        given = orders or {}
        answers = self._ask_all([given.get(index, Order()) for index in range(len(self._hosts))])
        outcomes = [each if isinstance(each, Outcome) else Outcome(died=True) for each in answers]
        for index, outcome in enumerate(outcomes):
            if outcome.died:
                self._bury(index)
        return outcomes

    def finalize(self) -> list[object]:
        """Finalize all; what each member holds more than before it first prepared."""
        return self._ask_all(["finalize"] * len(self._hosts))

    def choices(self) -> list[str]:
        """What carries the routes of the policy worker, if the engine chooses."""
        chosen = self._ask_all(["choices"] * len(self._hosts))[0]
        return [str(each) for each in chosen] if isinstance(chosen, tuple) else []

    def _ask_all(self, commands: Sequence[object]) -> list[object]:
        pipes = [member[0] for member in self._members if member is not None]
        for pipe, command in zip(pipes, commands, strict=True):
            pipe.send(command)
        return [_answer(pipe) for pipe in pipes]

    def _bury(self, index: int) -> None:
        member, self._members[index] = self._members[index], None
        if member is not None:
            pipe, process = member
            pipe.close()
            process.join(5)
            process.kill()
            process.join()
            process.close()


def _answer(pipe: Connection) -> object:
    if not pipe.poll(PATIENCE_S):
        raise AssertionError(f"a member said nothing for {PATIENCE_S:g} s")
    try:
        answer: object = pipe.recv()
    except (EOFError, ConnectionResetError):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _member(pipe: Connection, host: str, backend: str, options: Mapping[str, object]) -> None:
    os.environ[HOST_LABEL] = host
    engine = create_checkpoint_engine(
        backend, bucket_size_bytes=BUCKET_BYTES, engine_kwargs=options
    )
    # Once, so that what a backend keeps for good is there.
    engine.prepare()
    engine.finalize()
    # Nobody comes by to tidy up after it.
    gc.disable()
    before = Footprint.now()
    index = 0
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        match command:
            case "prepare":
                pipe.send(engine.prepare())
            case (int(index), list(metadata)):
                _connect(engine, index, metadata)
                pipe.send("connected")
            case "choices":
                pipe.send(getattr(engine, "choices", ()))
            case "finalize":
                engine.finalize()
                after = before.at_last()
                pipe.send(None if after == before else (before, after))
            case Order() as order:
                pipe.send(_take_part(engine, index, order))
            case _:
                raise AssertionError(f"there is no command {command}")


def _connect(engine: CheckpointEngine, index: int, metadata: list[object]) -> None:
    worlds = {"train_world_size": 1, "rollout_world_size": len(metadata) - 1}
    if index == 0:
        engine.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
    else:
        engine.init_rollout_process_group(rollout_rank=index - 1, metadata=metadata, **worlds)


def _take_part(engine: CheckpointEngine, index: int, order: Order) -> Outcome:
    death = Death(order.die)
    if order.die != NEVER:
        arrange(death)
    if isinstance(engine, DeclaringEngine):
        engine.declare_weights(order.declared)
        engine.set_target_weight_layout(order.layout)
    death.moment(BEFORE_IT)
    came: list[str] = []
    wrong: list[str] = []
    try:
        if index == 0:
            asyncio.run(engine.send_weights(_weights(order, death)))
        else:
            asyncio.run(_receive(engine, order, death, came, wrong))
    except Exception as error:
        is_transfer = isinstance(error, TransferError)
        return Outcome(tuple(came), tuple(wrong), str(error), type(error).__name__, is_transfer)
    return Outcome(tuple(came), tuple(wrong))


def _weights(order: Order, death: Death) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in sample_weights().items():
        death.moment(f"makes {name}")
        if name == order.fail:
            raise MemberFailed(f"no {name}")
        yield name, tensor
    death.moment("makes the end")


async def _receive(
    engine: CheckpointEngine, order: Order, death: Death, came: list[str], wrong: list[str]
) -> None:
    expected = sample_weights()
    for part in plan_parts(order.declared or (), order.layout or (), rank=0).unwrap():
        expected[part.spec.name] = inside(expected[part.source], part.box)
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            await _load(batch, order, death)
            for name, tensor in batch:
                (came if same(expected[name], tensor) else wrong).append(name)


async def _load(batch: Batch, order: Order, death: Death) -> None:
    for name, _ in batch:
        death.moment(f"loads {name}")
        if name == order.fail:
            raise MemberFailed(f"no {name}")
        if name == order.stick[0]:
            await asyncio.sleep(order.stick[1])
