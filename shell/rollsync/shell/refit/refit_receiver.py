"""The receiving half of a refit on one rollout rank, whatever model it updates.

`RefitReceiver` runs the checkpoint engine's life cycle and keeps the rank's life-cycle state.
Rules kept here: the model is not touched before the first weights are there; an update is finished
or aborted before `update` returns; and a failed one leaves the rank poisoned, also if no weight of
it came: what it holds is whole then, but not what the policy meant it to hold.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

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
from rollsync.shell.refit.engines.kept_errors import run_stream
from rollsync.shell.refit.errors import RefitError, accepted
from rollsync.shell.refit.intake import Batch, Intake
from rollsync.shell.refit.learned_load import LearnedLoad, Reception
from rollsync.shell.refit.load_recorder import LoadRecorder
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.weights import TAKES_VERSION, WEIGHT_VERSION_NAME


class ModelUpdate(Protocol):
    """One whole update of a model; a batch may be reused once `load` has returned.

    Layers are left out, before it starts, that get their weights past its loader.
    """

    def leave_out(self, layers: frozenset[str], /) -> None: ...

    def start(self) -> None: ...

    def load(self, batch: Batch, /) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...


@dataclass
class _Tally:
    tensors: int = 0
    payload_bytes: int = 0
    direct_bytes: int = 0
    batches: int = 0
    load_s: float = 0.0

    def take(self, batch: Batch) -> None:
        """Counts what came; a tied tensor, which comes under several names, once."""
        came = {id(tensor): tensor.nbytes for _, tensor in batch}
        self.tensors += len(came)
        self.payload_bytes += sum(came.values())
        self.batches += 1

    def take_past_loader(self, tensors: Mapping[str, int]) -> None:
        """Counts what came by another way than in batches: names and bytes."""
        self.tensors += len(tensors)
        self.direct_bytes = sum(tensors.values())
        self.payload_bytes += self.direct_bytes


class RefitReceiver:
    """A rollout rank's end of the checkpoint engine, and what the rank may generate with.

    Args:
        local_rank: the rank in its engine's process group.
        engine_world_size: the size of that group.
        make_update: makes an update of this rank's model, which tells a recorder what it loads.
        model: that model, whose loader may be watched: then a rank that shares its engine's model
            with others is sent only the parts that it keeps, and an engine that can reads tensors
            straight into it. None always takes whole tensors.
    """

    def __init__(
        self,
        *,
        local_rank: int,
        engine_world_size: int,
        make_update: Callable[[LoadRecorder | None], ModelUpdate],
        model: Callable[[], torch.nn.Module] | None = None,
    ) -> None:
        self._local_rank = local_rank
        self._engine_world_size = engine_world_size
        self._make_update = make_update
        self._slot = EngineSlot()
        self._declared: tuple[TensorSpec, ...] | None = None
        self._learned = LearnedLoad(model, is_shared=engine_world_size > 1)
        self._rollout_rank = local_rank
        self.state: EngineState = Unconnected()

    def declare(self, declared: Sequence[TensorSpec] | None) -> None:
        """Takes what the policy will send, in its order; later streams are checked against it."""
        self._declared = None if declared is None else tuple(declared)
        self._learned.declare(self._declared or ())

    def init(self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, object]) -> None:
        """Makes the checkpoint engine, unless it is there already."""
        self._slot.init(backend, bucket_size_bytes, engine_kwargs)

    def prepare(self) -> object:
        """Makes the engine reachable; answers its metadata, a mapping with the rank added, and with
        the mark that a stream's version may come first."""
        return self._slot.prepare(rank=self._local_rank, **{TAKES_VERSION: True})

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
        reception = self._learned.reception(directly=self._slot.reads_directly)
        update = self._make_update(reception.recorder)
        try:
            if reception.destinations is not None:
                update.leave_out(reception.plan.layers)
            self._slot.declare(self._declared)
            self._slot.keep(reception.layout)
            self._slot.read_into(reception.destinations)
            return run_stream(self._update(engine, update, reception))
        except BaseException as error:
            self._apply(UpdateFailed(f"{type(error).__name__}: {error}"))
            self._learned.forget()
            update.abort()
            raise
        finally:
            self._slot.read_into(None)

    async def _update(
        self, engine: CheckpointEngine, update: ModelUpdate, reception: Reception
    ) -> WorkerTransfer:
        started_s = time.perf_counter()
        tally = _Tally()
        begun: tuple[int, Intake] | None = None
        async with aclosing(engine.receive_weight_batches()) as batches:
            async for received in batches:
                batch: Batch = received
                if begun is None:
                    version, batch = self._first(received)
                    self._apply(BeginUpdate(version))
                    update.start()
                    begun = (
                        version,
                        reception.intake(in_parts=self._slot.comes_in_parts),
                    )
                _, intake = begun
                _load(update, intake, batch, tally)
                tally.take(batch)
        if begun is None:
            raise RefitError(
                "the stream of weights was empty", remedy="yield weights from the policy's iterator"
            )
        version, intake = begun
        intake.check_complete()
        tally.take_past_loader(intake.past_loader())
        closing_s = time.perf_counter()
        update.finish()
        if reception.recorder is not None:
            self._learned.learn(reception.recorder)
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
            direct_bytes=tally.direct_bytes,
            buckets=self._slot.buckets,
        )

    def _first(self, batch: Batch) -> tuple[int, Batch]:
        """The version that a stream is of, and its first batch without it."""
        if batch and batch[0][0] == WEIGHT_VERSION_NAME:
            return int(batch[0][1].item()), batch[1:]
        # A policy that is not rollsync's names no version: then syncs are counted.
        return next_version(self.state), batch

    def _apply(self, event: EngineEvent) -> None:
        self.state = accepted(apply(self.state, event))


def _load(update: ModelUpdate, intake: Intake, batch: Batch, tally: _Tally) -> None:
    started_s = time.perf_counter()
    for load in intake.loads(batch):
        update.load(load)
    tally.load_s += time.perf_counter() - started_s
