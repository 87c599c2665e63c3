"""The sending half of a refit on one policy rank, whatever module it sends.

Rules kept here: the iterator is consumed to its end on every rank, also on one that feeds nobody,
because advancing it may be a collective of all ranks; and whatever belongs to the policy runs
inside the stream, its version too, so that its failure is told to the receivers that wait; and
receivers that are known to have failed are not waited for.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import torch

from rollsync.pure.refit import EngineChoice, TensorSpec
from rollsync.shell.refit.engine_slot import EngineSlot
from rollsync.shell.refit.engines import CheckpointEngine
from rollsync.shell.refit.engines.kept_errors import run_stream
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.weights import TAKES_VERSION, with_version

_LOOK_EVERY_S: Final = 0.2
_LAST_WORDS_S: Final = 2.0
"""How long the stream itself may take to say why the receivers failed, which says more."""


class RefitSender:
    """A policy rank's end of the checkpoint engine.

    Args:
        rank: the rank among the policy's workers.
    """

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._slot = EngineSlot()
        self._names_version = True

    def init(self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, object]) -> None:
        """Makes the checkpoint engine, unless it is there already."""
        self._slot.init(backend, bucket_size_bytes, engine_kwargs)

    def prepare(self) -> object:
        """Makes the engine reachable; answers its metadata, a mapping with the rank added."""
        return self._slot.prepare(rank=self._rank)

    def init_process_group(
        self, *, metadata: list[object], train_world_size: int, rollout_world_size: int
    ) -> tuple[EngineChoice, ...]:
        """Connects to the rollout workers; what carries each route, if the engine chooses.

        Args:
            metadata: every worker's, policy workers first.
        """
        self._slot.engine.init_policy_process_group(
            worker_rank=self._rank,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )
        # One that is not rollsync's would load the version as a weight. What is no mapping cannot
        # bear the mark, and is taken for rollsync's.
        self._names_version = all(
            TAKES_VERSION in of_worker
            for of_worker in metadata[train_world_size:]
            if isinstance(of_worker, Mapping)
        )
        return self._slot.choices

    def declare(self, specs: Sequence[TensorSpec] | None) -> None:
        """Takes what streams will hold, in their order, for the engine to compare with what the
        rollout workers expect."""
        self._slot.declare(specs)

    def send(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        weight_version: Callable[[], int],
        receiving: Future[None] | None = None,
    ) -> WorkerTransfer:
        """Sends one whole stream, in front of it its version where all receivers take that.

        Args:
            weights: names and tensors.
            weight_version: the version of these weights.
            receiving: the call in which the rollout workers receive, if this side knows of it;
                when it fails, the stream is not waited for.

        Raises:
            RefitError: `receiving` failed, which is the cause.
        """
        engine = self._slot.engine
        stream = _Stream(weights, weight_version, names_version=self._names_version)
        started_s = time.perf_counter()
        run_stream(_send(engine, stream, receiving))
        return WorkerTransfer(
            role="policy",
            rank=self._rank,
            weight_version=stream.version,
            tensors=stream.tensors,
            payload_bytes=stream.payload_bytes,
            batches=0,
            stage_s={"send": time.perf_counter() - started_s},
        )

    def finalize(self) -> None:
        """Gives back what `prepare` reserved."""
        self._slot.finalize()


async def _send(
    engine: CheckpointEngine, stream: "_Stream", receiving: Future[None] | None
) -> None:
    if receiving is None:
        await engine.send_weights(iter(stream))
        return
    sending = asyncio.ensure_future(engine.send_weights(iter(stream)))
    try:
        while not receiving.done() and not sending.done():
            await asyncio.wait({sending}, timeout=_LOOK_EVERY_S)
        failure = receiving.exception() if receiving.done() else None
        if failure is not None:
            await asyncio.wait({sending}, timeout=_LAST_WORDS_S)
        if failure is None or sending.done():
            await sending
            return
    finally:
        sending.cancel()
        await asyncio.wait({sending})
        # An error that it ended with, and that passes here, would keep itself.
        del sending
    raise RefitError(
        f"the weights are not taken: {type(failure).__name__}: {failure}",
        remedy="put right what this names, and send again",
    ) from failure


class _Stream:
    """Weights, behind their version if it is named; knows how much of them has passed."""

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        weight_version: Callable[[], int],
        *,
        names_version: bool,
    ) -> None:
        self._weights = weights
        self._names_version = names_version
        self._weight_version = weight_version
        self.version: int | None = None
        self.tensors = 0
        self.payload_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.version = self._weight_version()
        counted = self._counted()
        yield from with_version(counted, self.version) if self._names_version else counted

    def _counted(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            yield name, tensor
            self.tensors += 1
            self.payload_bytes += tensor.nbytes
