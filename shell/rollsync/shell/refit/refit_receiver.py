"""The receiving half of a refit on one rollout rank, whatever model it updates.

`RefitReceiver` runs the checkpoint engine's life cycle and keeps the rank's life-cycle state.
Rules kept here: the model is not touched before the first weights are there; an update is finished
or aborted before `update` returns; and a failed one leaves the rank poisoned, also if no weight of
it came: what it holds is whole then, but not what the policy meant it to hold.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from rollsync.pure.refit import TensorSpec, rollout_rank
from rollsync.pure.refit.lifecycle import (
    BeginUpdate,
    Connect,
    Disconnect,
    EngineEvent,
    EngineState,
    FinishUpdate,
    Unconnected,
    UpdateFailed,
    apply,
    next_version,
)
from rollsync.shell.refit.engine_slot import EngineSlot
from rollsync.shell.refit.engines import CheckpointEngine
from rollsync.shell.refit.errors import RefitError, accepted
from rollsync.shell.refit.kept_parts import KeptParts, PartAssembly
from rollsync.shell.refit.learned_load import DirectLoad, LearnedLoad
from rollsync.shell.refit.load_recorder import LoadRecorder
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.weights import WEIGHT_VERSION_NAME, WeightChecker

Batch = Sequence[tuple[str, torch.Tensor]]


@runtime_checkable
class PartialUpdate(Protocol):
    """An update that other ways than its loader may take part in."""

    def leave_out(self, layers: frozenset[str], /) -> None: ...


class ModelUpdate(Protocol):
    """One whole update of a model; a batch may be reused once `load` has returned."""

    def start(self) -> None: ...

    def load(self, batch: Batch, /) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


@dataclass
class _Tally:
    tensors: int = 0
    payload_bytes: int = 0
    batches: int = 0
    load_s: float = 0.0

    def take(self, batch: Batch) -> None:
        """Counts what came; a tied tensor, which comes under several names, once."""
        came = {id(tensor): tensor.nbytes for _, tensor in batch}
        self.tensors += len(came)
        self.payload_bytes += sum(came.values())
        self.batches += 1


class RefitReceiver:
    """A rollout rank's end of the checkpoint engine, and what the rank may generate with.

    Args:
        local_rank: the rank in its engine's process group.
        engine_world_size: the size of that group.
        update: makes the update of this rank's model, which tells a recorder what it loads.
        model: that model, where several ranks share one and each keeps parts of it: then they are
            sent no more than that, as soon as it is known. None always takes whole tensors.
    """

    def __init__(
        self,
        *,
        local_rank: int,
        engine_world_size: int,
        update: Callable[[LoadRecorder | None], ModelUpdate],
        model: Callable[[], torch.nn.Module] | None = None,
    ) -> None:
        self._local_rank = local_rank
        self._engine_world_size = engine_world_size
        self._make_update = update
        self._slot = EngineSlot()
        self._declared: tuple[TensorSpec, ...] | None = None
        self._by_name: dict[str, TensorSpec] = {}
        self._kept = KeptParts(model) if model is not None and engine_world_size > 1 else None
        self._model = model
        self._learned: LearnedLoad | None = None
        self._rollout_rank = local_rank
        self.state: EngineState = Unconnected()

    def declare(self, declared: Sequence[TensorSpec] | None) -> None:
        """Takes what the policy will send, in its order; later streams are checked against it."""
        self._declared = None if declared is None else tuple(declared)
        self._by_name = {spec.name: spec for spec in declared or ()}
        if self._kept is not None:
            self._kept.declare(self._declared or ())

    def init(self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, object]) -> None:
        """Makes the checkpoint engine, unless it is there already."""
        self._slot.init(backend, bucket_size_bytes, engine_kwargs)

    def prepare(self) -> object:
        """Reserves the engine's buffers; answers its metadata, a mapping with the rank added."""
        return self._slot.prepare(self._local_rank)

    def init_process_group(
        self,
        rank_prefix: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[object],
    ) -> None:
        """Connects to the policy's workers.

        Args:
            rank_prefix: rollout workers in the engines before this one.
            train_world_size: policy workers.
            rollout_world_size: rollout workers of all engines.
            metadata: what every worker answered to `prepare`, policy workers first.
        """
        engine = self._slot.engine
        self._rollout_rank = accepted(
            rollout_rank(
                rank_prefix=rank_prefix,
                local_rank=self._local_rank,
                engine_world_size=self._engine_world_size,
                rollout_world_size=rollout_world_size,
            )
        )
        engine.init_rollout_process_group(
            rollout_rank=self._rollout_rank,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )
        self._apply(Connect())

    def finalize(self) -> None:
        """Gives back what `prepare` reserved; the weights stay."""
        if self._slot.finalize():
            self._apply(Disconnect())

    def update(self) -> WorkerTransfer:
        """Receives and loads one whole stream.

        Raises:
            Exception: whatever went wrong; the state says whether the weights are a mixture.
        """
        engine = self._slot.engine
        # Nothing may be waited for that could not begin.
        accepted(apply(self.state, BeginUpdate(next_version(self.state))))
        if self._slot.reads_directly and self._model is not None:
            return self._update_directly(engine, self._model())
        recorder = None if self._kept is None else self._kept.recorder()
        update = self._make_update(recorder)
        try:
            self._slot.declare(self._declared)
            self._slot.keep(None if self._kept is None else self._kept.layout)
            return asyncio.run(self._update(engine, update, recorder))
        except BaseException as error:
            self._apply(UpdateFailed(f"{type(error).__name__}: {error}"))
            if self._kept is not None:
                self._kept.forget()
            update.abort()
            raise

    def _update_directly(self, engine: CheckpointEngine, model: torch.nn.Module) -> WorkerTransfer:
        """Receives one stream of which the engine reads straight into the model what it can."""
        if self._learned is None:
            self._learned = LearnedLoad(model)
        learned = self._learned
        destinations = learned.destinations()
        recorder = learned.recorder() if learned.is_empty else None
        update = self._make_update(recorder)
        if destinations is not None and isinstance(update, PartialUpdate):
            update.leave_out(learned.layers)
        else:
            destinations = None
        aliases = {alias for spec in self._declared or () for alias in spec.aliases}
        try:
            self._slot.declare(self._declared)
            self._slot.keep(None)
            self._slot.read_into(destinations)
            direct = None if destinations is None else DirectLoad(learned, destinations, aliases)
            transfer = asyncio.run(self._update(engine, update, None, direct))
            if recorder is not None:
                learned.learn(recorder, aliases)
            return transfer
        except BaseException as error:
            self._apply(UpdateFailed(f"{type(error).__name__}: {error}"))
            learned.forget()
            update.abort()
            raise
        finally:
            self._slot.read_into(None)

    async def _update(
        self,
        engine: CheckpointEngine,
        update: ModelUpdate,
        recorder: LoadRecorder | None,
        direct: DirectLoad | None = None,
    ) -> WorkerTransfer:
        started_s = time.perf_counter()
        tally = _Tally()
        version: int | None = None
        assembly: PartAssembly | None = None
        checker = WeightChecker(self._by_name, whole_tensors=not engine.shard_expert_weights)
        async with aclosing(engine.receive_weight_batches()) as batches:
            async for received in batches:
                batch: Batch = received
                if version is None:
                    version, batch = self._first(received)
                    self._apply(BeginUpdate(version))
                    update.start()
                    if self._kept is not None and self._slot.comes_in_parts:
                        assembly = self._kept.assembly()
                        checker = WeightChecker(assembly.specs)
                if direct is not None:
                    direct.note_batch(batch)
                loads = [batch] if assembly is None else assembly.loads(batch)
                _load(update, checker, loads, tally)
                tally.take(batch)
        if version is None:
            raise RefitError(
                "the stream of weights was empty", remedy="yield weights from the policy's iterator"
            )
        if direct is not None:
            for name, size in direct.arrivals().items():
                checker.note_arrival(name)
                tally.tensors += 1
                tally.payload_bytes += size
        checker.check_complete()
        closing_s = time.perf_counter()
        update.finish()
        if self._kept is not None and recorder is not None:
            self._kept.learn(recorder)
        self._apply(FinishUpdate(version))
        done_s = time.perf_counter()
        return WorkerTransfer(
            role="rollout",
            rank=self._rollout_rank,
            weight_version=version,
            tensors=tally.tensors,
            payload_bytes=tally.payload_bytes,
            batches=tally.batches,
            stage_s={
                "receive": closing_s - started_s - tally.load_s,
                "load": tally.load_s,
                "finish": done_s - closing_s,
            },
        )

    def _first(self, batch: Batch) -> tuple[int, Batch]:
        """The version that a stream is of, and its first batch without it."""
        if batch and batch[0][0] == WEIGHT_VERSION_NAME:
            return int(batch[0][1].item()), batch[1:]
        # A policy that is not rollsync's names no version: then syncs are counted.
        return next_version(self.state), batch

    def _apply(self, event: EngineEvent) -> None:
        self.state = accepted(apply(self.state, event))


def _load(
    update: ModelUpdate, checker: WeightChecker, loads: Iterable[Batch], tally: _Tally
) -> None:
    started_s = time.perf_counter()
    for load in loads:
        update.load(checker.check(load))
    tally.load_s += time.perf_counter() - started_s
