"""The controller of an asynchronous run: restores, then runs the three pumps side by side.

The rollout pump generates, the train pump trains and moves the weights, the snapshot pump saves.
They meet only in the state cell and the barrier. Rule kept here: the first thing after a restore is
a weight sync, so that no engine serves anything but the trainer's version; and the run ends with a
save, however it is stopped; unless it is asked to before it has begun, when there is nothing to
save.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.cadence import cadence_warnings
from rollsync.pure.rollout.checkpointing import (
    CheckpointKind,
    RolloutCheckpointOutcome,
    RolloutCheckpointSaveResult,
)
from rollsync.pure.rollout.events import GroupDropped, RolloutEvent
from rollsync.pure.rollout.explain import explain
from rollsync.pure.rollout.sampler import PromptGroupSampler
from rollsync.pure.rollout.settings import buffer_capacity, resume_policy
from rollsync.pure.rollout.state import RolloutState, TrainingProgress, fresh_state
from rollsync.shell.journal import Finished, Journal, PromptDropped, Resumed, Saved
from rollsync.shell.rollout.archive import ResumeArchive, SnapshotArchive
from rollsync.shell.rollout.barrier import DataPlaneCheckpointBarrier
from rollsync.shell.rollout.bundle_writer import BundleWriter
from rollsync.shell.rollout.cell import StateCell
from rollsync.shell.rollout.clients import (
    Codec,
    EnginesLost,
    FleetWatch,
    GenerationClient,
    SteadyFleet,
    TrainerClient,
    TrainerLost,
    Verifier,
    WeightSync,
)
from rollsync.shell.rollout.data_plane import DataPlane
from rollsync.shell.rollout.environments import EnvironmentCheckpoint
from rollsync.shell.rollout.last_save import save_last
from rollsync.shell.rollout.parts import RolloutParts
from rollsync.shell.rollout.prompts import PromptDataloader
from rollsync.shell.rollout.replay_buffer import TQReplayBuffer
from rollsync.shell.rollout.restore import RestoredRollout, RolloutRestorer
from rollsync.shell.rollout.rollout_pump import RolloutPump
from rollsync.shell.rollout.snapshot_pump import SnapshotPump
from rollsync.shell.rollout.snapshots import RolloutSnapshotter
from rollsync.shell.rollout.stopping import done_before
from rollsync.shell.rollout.trace import RolloutTraceRecorder
from rollsync.shell.rollout.train_pump import TrainingEnd, TrainPump
from rollsync.shell.rollout.waiting import ChangeSignal

PARTITION = "rollouts"
_CUT_SHORT = "asked to stop a second time, so nothing was waited for or saved any more"
_NOT_BEGUN = "asked to stop during the start; nothing was done, so there is nothing to save"

_logger = logging.getLogger(__name__)


class RunArchive(SnapshotArchive, ResumeArchive, Protocol):
    """The run directory, for saving and for resuming."""


@dataclass(frozen=True, kw_only=True)
class RunClients:
    """What a run works with, outside this process's event loop."""

    trainer: TrainerClient
    load_trainer: Callable[[Path], Awaitable[None]]
    """Puts the trainer back to what a trainer checkpoint holds."""
    generation: GenerationClient
    sync: WeightSync
    codec: Codec
    verifier: Verifier
    fleet: FleetWatch = field(default_factory=SteadyFleet)


class RunOutcome(Struct, frozen=True, kw_only=True):
    """How a process's part of a run ended."""

    state: RolloutState
    why: str
    completed: bool
    """False when it was stopped and can be resumed."""
    saved: bool
    """False when the last save failed: what was done since the one before is done again."""


class RolloutController:
    """One process's part of a run.

    Args:
        config: the run's configuration, checked.
        sampler: the staleness policy that the configuration names.
        clients: trainer, engines and their helpers.
        dataloader: hands out prompts.
        plane: where rows are.
        archive: the run directory.
        environment: what the environment keeps between turns.
        journal: where everything that happens is written down.
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        sampler: PromptGroupSampler,
        clients: RunClients,
        dataloader: PromptDataloader,
        plane: DataPlane,
        archive: RunArchive,
        environment: EnvironmentCheckpoint,
        journal: Journal,
    ) -> None:
        self._config = config
        self._clients = clients
        self._journal = journal
        changes = ChangeSignal()
        self.barrier = DataPlaneCheckpointBarrier()
        self.cell = StateCell(_first_state(config, sampler, dataloader), self.barrier)
        self.parts = self._make_parts(sampler, dataloader, plane, environment)
        self._rollouts = RolloutPump(
            self.parts,
            config,
            dataloader=dataloader,
            generation=clients.generation,
            codec=clients.codec,
            verifier=clients.verifier,
            changes=changes,
        )
        writer = BundleWriter(archive)
        self._snapshotter = RolloutSnapshotter(
            self.parts,
            archive=archive,
            writer=writer,
            before_publication=journal.sync,
            ended=self._saved,
        )
        self._restorer = RolloutRestorer(
            self.parts,
            archive=archive,
            policy=resume_policy(config, sampler, self._rollouts.limits()),
            writer=writer,
        )
        self._training = TrainPump(
            self.parts,
            config,
            rollouts=self._rollouts,
            trainer=clients.trainer,
            sync=clients.sync,
            fleet=clients.fleet,
            snapshotter=self._snapshotter,
            changes=changes,
            journal=journal,
        )
        self.cell.listen(self._saw)

    def _make_parts(
        self,
        sampler: PromptGroupSampler,
        dataloader: PromptDataloader,
        plane: DataPlane,
        environment: EnvironmentCheckpoint,
    ) -> RolloutParts:
        capacity = buffer_capacity(self._config, sampler)
        return RolloutParts(
            master_config=self._config,
            dp_client=plane,
            partition_id=PARTITION,
            buffer=TQReplayBuffer(
                self.cell, self.barrier, plane, partition_id=PARTITION, capacity=capacity
            ),
            dataloader=dataloader,
            sampler=sampler,
            rollout_manager=self,
            data_plane_barrier=self.barrier,
            environment_checkpoint=environment,
            runtime_state=self.cell,
            read_progress=self._read_progress,
            log_metrics=self._log_metrics,
            trace=RolloutTraceRecorder(),
        )

    def close_admission(self, why: str) -> None:
        """Start no further rollout."""
        self._rollouts.close_admission(why)

    async def run(self, stop: asyncio.Event) -> RunOutcome:
        """Restore and run to the end, or until `stop` is set or the deadline has come.

        Raises:
            RollsyncError: the run cannot begin, or cannot go on; it can be resumed.
        """
        for warning in cadence_warnings(self._config):
            _logger.warning("%s", warning)
        started_s = asyncio.get_running_loop().time()
        pump = SnapshotPump(
            self._snapshotter,
            self._config.checkpointing,
            run_started_s=started_s,
            longest_step_s=lambda: self._training.longest_step_s,
        )
        save_by_s = self._config.checkpointing.checkpoint_must_save_by_s
        if not await done_before(stop, self._restore()):
            return self.not_begun()
        if not await done_before(stop, self._training.sync_weights()):
            self._finished(_NOT_BEGUN)
            return self.not_begun()
        try:
            end = await self._pump(
                pump, stop, deadline_s=None if save_by_s is None else started_s + save_by_s
            )
        except* Exception as errors:
            cause = _first_cause(errors)
            if isinstance(cause, TrainerLost):
                # Of the trainer nothing can be saved, of the rollouts what there is an anchor for.
                await self._snapshotter.save_rollout_snapshot(force=True)
            self._finished(str(cause))
            raise cause from errors
        self._finished(end.why)
        return RunOutcome(
            state=self.cell.state, why=end.why, completed=end.completed, saved=end.saved
        )

    def not_begun(self) -> RunOutcome:
        """The outcome of a run that was asked to stop before it generated or trained anything."""
        return RunOutcome(state=self.cell.state, why=_NOT_BEGUN, completed=False, saved=True)

    def cut_short(self) -> RunOutcome:
        """The outcome of a run whose `run` was cancelled, as it was asked to stop once more."""
        self._finished(_CUT_SHORT)
        return RunOutcome(state=self.cell.state, why=_CUT_SHORT, completed=False, saved=False)

    def _finished(self, why: str) -> None:
        step = self.cell.state.progress.train_steps
        self._journal.write(Finished(train_steps=step, why=why))

    async def _pump(
        self, pump: SnapshotPump, stop: asyncio.Event, *, deadline_s: float | None
    ) -> TrainingEnd:
        snapshots_stop = asyncio.Event()
        async with asyncio.TaskGroup() as pumps:
            rollouts = pumps.create_task(self._rollouts.run(), name="rollout pump")
            pumps.create_task(pump.run(snapshots_stop), name="snapshot pump")
            training = pumps.create_task(self._training.run(), name="train pump")
            asked = pumps.create_task(stop.wait(), name="stop")
            deadline = pumps.create_task(pump.last_is_due.wait(), name="deadline")
            lost = pumps.create_task(self._clients.fleet.wait_lost(), name="engines")
            ends = (training, asked, deadline, lost)
            # The other two only end by failing, and then the task group ends this wait.
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            snapshots_stop.set()
            if training.done():
                end = training.result()
            elif lost.done():
                end = await self._end_without_engines(training, lost.result())
            elif asked.done():
                end = await self._save_last(training, "asked to stop", until_s=None)
            else:
                why = "the deadline to save by has come"
                end = await self._save_last(training, why, until_s=deadline_s)
            for task in (rollouts, *ends):
                task.cancel()
        return end

    async def _end_without_engines(
        self, training: asyncio.Task[TrainingEnd], lost: EnginesLost
    ) -> TrainingEnd:
        """Let the step that is being trained end, save, and raise; unless it was the last."""
        self._training.stop_after_step()
        await asyncio.wait((training,), timeout=self._step_timeout_s)
        if training.done() and training.result().completed:
            return training.result()
        await self._save_last(training, "engines are lost", until_s=None)
        raise lost

    async def _save_last(
        self, training: asyncio.Task[TrainingEnd], why: str, *, until_s: float | None
    ) -> TrainingEnd:
        last = await save_last(
            self._snapshotter,
            training,
            stop_after_step=self._training.stop_after_step,
            train_steps=lambda: self.cell.state.progress.train_steps,
            until_s=until_s,
            step_timeout_s=self._step_timeout_s,
        )
        if training.done() and training.result().completed:
            return training.result()
        return TrainingEnd(why=f"{why}; {last.how}", completed=False, saved=last.saved)

    @property
    def _step_timeout_s(self) -> float:
        """How long a run that is to end waits for a step and its checkpoint."""
        config = self._config
        return config.cluster.collective_timeout_s + config.checkpointing.save_timeout_s

    async def _restore(self) -> None:
        restored = await self._restorer.restore()
        if restored is not None and restored.trainer_path is not None:
            await self._clients.load_trainer(restored.trainer_path)
        self._note_restored(restored)

    def _note_restored(self, restored: RestoredRollout | None) -> None:
        steps = self.cell.state.progress.train_steps
        if restored is None:
            self._journal.write(Resumed(train_steps=steps, source=None))
            return
        source = restored.source.path
        self._journal.write(
            Resumed(
                train_steps=steps,
                source=None if source is None else self._name(source),
                plan=tuple(explain(restored.plan)),
                refused=tuple(f"{self._name(each.path)}: {each.why}" for each in restored.refused),
            )
        )

    def _name(self, bundle: str) -> str:
        """The bundle's path relative to the run directory, which may be moved."""
        return Path(bundle).relative_to(self._config.run.directory).as_posix()

    def _read_progress(self) -> TrainingProgress:
        version = self._clients.trainer.trainer_version
        return replace(self.cell.state.progress, train_steps=version, trainer_version=version)

    def _saved(
        self, kind: CheckpointKind, train_steps: int, result: RolloutCheckpointSaveResult
    ) -> None:
        if result.reason.outcome is RolloutCheckpointOutcome.SKIPPED:
            return
        pause_s = self.barrier.take_telemetry().longest_checkpoint_hold_s
        self._journal.write(
            Saved(
                what=kind.value,
                saved=result.saved,
                reason=result.reason.value,
                train_steps=train_steps,
                pause_ms=pause_s * 1e3,
            )
        )

    def _saw(self, event: RolloutEvent, _: RolloutState) -> None:
        if isinstance(event, GroupDropped):
            self._journal.write(PromptDropped(prompt_id=event.group_id, reason=event.reason.value))

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        _logger.debug("%s", metrics)


def _first_state(
    config: MasterConfig, sampler: PromptGroupSampler, dataloader: PromptDataloader
) -> RolloutState:
    return fresh_state(
        dataset_digest=dataloader.digest,
        seed=config.run.seed,
        sampler_stamps_target_steps=sampler.stamps_target_steps,
    )


def _first_cause(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first error that is not a group: the others follow from it being cancelled."""
    error: Exception | BaseExceptionGroup[Exception] = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
