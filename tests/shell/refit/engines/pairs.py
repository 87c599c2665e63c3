"""Both ends of built-in engines in one process: one policy worker and its rollout workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import torch

from rollsync.pure.refit import TensorSpec
from rollsync.shell.refit.engines import create_checkpoint_engine
from rollsync.shell.refit.engines.staged import StagedEngine
from rollsync.shell.refit.weights import dtype_name

BUCKET_BYTES = 4096


@dataclass
class Stream:
    """What became of one stream.

    Attributes:
        received: by rollout worker, the names and contents that came, in order.
        made: the names that the sender asked its iterator for.
        errors: what each end raised, the sender first; None for an end that raised nothing.
    """

    received: list[dict[str, torch.Tensor]]
    made: list[str] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=list)

    def raise_first(self) -> None:
        """Raise the sender's error, or else a receiver's."""
        for error in self.errors:
            if error is not None:
                raise error

    def received_bytes(self, rank: int) -> int:
        """Bytes of what a rollout worker got, tied tensors counted once."""
        once = {each.data_ptr(): each.nbytes for each in self.received[rank].values()}
        return sum(once.values())


@dataclass
class Pair:
    """The ends, connected."""

    sender: StagedEngine
    receivers: list[StagedEngine]

    def declare(self, specs: Sequence[TensorSpec] | None) -> None:
        """The same on both sides."""
        for engine in (self.sender, *self.receivers):
            engine.declare_weights(specs)

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Stream:
        """Sends one stream; both ends may fail."""
        return asyncio.run(self._stream(weights))

    async def _stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Stream:
        stream = Stream([{} for _ in self.receivers])

        def made() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                stream.made.append(name)
                yield name, tensor

        answers = await asyncio.gather(
            self.sender.send_weights(made()),
            *(_receive(*each) for each in zip(self.receivers, stream.received, strict=True)),
            return_exceptions=True,
        )
        stream.errors = [each if isinstance(each, BaseException) else None for each in answers]
        return stream


async def _receive(engine: StagedEngine, into: dict[str, torch.Tensor]) -> None:
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            copies: dict[int, torch.Tensor] = {}
            for name, tensor in batch:
                # What is one memory stays one.
                copy = copies.setdefault(tensor.data_ptr() or id(tensor), tensor.clone())
                into[name] = copy


@contextmanager
def pair(
    backend: str, receivers: int = 1, bucket_bytes: int = BUCKET_BYTES, **options: object
) -> Iterator[Pair]:
    """Connected ends, finalized at the end."""
    engines = [_engine(backend, bucket_bytes, options) for _ in range(1 + receivers)]
    metadata = [engine.prepare() for engine in engines]
    sender, *rollout = engines
    sender.init_policy_process_group(
        worker_rank=0, train_world_size=1, rollout_world_size=receivers, metadata=metadata
    )
    for rank, engine in enumerate(rollout):
        engine.init_rollout_process_group(
            rollout_rank=rank, train_world_size=1, rollout_world_size=receivers, metadata=metadata
        )
    try:
        yield Pair(sender, rollout)
    finally:
        for engine in engines:
            engine.finalize()


def _engine(backend: str, bucket_bytes: int, options: Mapping[str, object]) -> StagedEngine:
    engine = create_checkpoint_engine(
        backend, bucket_size_bytes=bucket_bytes, engine_kwargs={"refit_timeout_s": 20.0, **options}
    )
    assert isinstance(engine, StagedEngine)
    return engine


def spec_of(name: str, tensor: torch.Tensor, *aliases: str) -> TensorSpec:
    """The declaration of a tensor."""
    return TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), aliases)
