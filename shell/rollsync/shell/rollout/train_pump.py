"""The train pump: claims what the sampler selects, trains it, syncs the weights, checkpoints.

Rules kept here: between the optimizer's first change and the committed counters the commit window
is open, so that nothing is saved of a step in the middle; what a step trained is cleared after the
commit; and the engines get the new weights before the pump looks for the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from msgspec import Struct

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.checkpointing import RolloutCheckpointSaveResult
from rollsync.pure.rollout.decisions import NothingLeft, Selection, SkipStep, TrainBatch, Wait
from rollsync.pure.rollout.drops import next_stale_drop
from rollsync.pure.rollout.events import OptimizerCommitOpened, StepCommitted
from rollsync.pure.rollout.state import ReplayGroup, RolloutState
from rollsync.shell.errors import RollsyncError
from rollsync.shell.grpo import StepMetrics, TrainingRow
from rollsync.shell.journal import Journal, StepClaimed, StepTrained, WeightsSynced
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.clients import EnginesLost, FleetWatch, TrainerClient, WeightSync
from rollsync.shell.rollout.errors import WorkersLost
from rollsync.shell.rollout.parts import RolloutParts
from rollsync.shell.rollout.rollout_pump import RolloutPump
from rollsync.shell.rollout.snapshots import RolloutSnapshotter
from rollsync.shell.rollout.waiting import ChangeSignal


class CheckpointFailed(RollsyncError):
    """A checkpoint could not be saved, so that steps would be lost by going on."""


class TrainingEnd(Struct, frozen=True, kw_only=True):
    """Why the train pump has ended."""

    why: str
    completed: bool
    """False when it was told to stop and there is more to train."""
    saved: bool = True
    """Whether all that was trained and generated is on disk."""


class TrainPump:
    """Trains batch after batch until the steps or the prompts are used up.

    Args:
        parts: the run's parts.
        config: the run's configuration.
        rollouts: told which weight version the engines serve.
        trainer: takes the optimizer steps.
        sync: brings the engines to the trainer's weights.
        fleet: says when an engine waits for them.
        snapshotter: saves the trainer checkpoints.
        changes: notified at every change of the state.
        journal: where steps and syncs are written down.
    """

    def __init__(
        self,
        parts: RolloutParts,
        config: MasterConfig,
        *,
        rollouts: RolloutPump,
        trainer: TrainerClient,
        sync: WeightSync,
        fleet: FleetWatch,
        snapshotter: RolloutSnapshotter,
        changes: ChangeSignal,
        journal: Journal,
    ) -> None:
        self._parts = parts
        self._config = config
        self._rollouts = rollouts
        self._trainer = trainer
        self._sync = sync
        self._fleet = fleet
        fleet.listen(changes.notify)
        self._snapshotter = snapshotter
        self._changes = changes
        self._journal = journal
        self._stopping = False
        self._saved: RolloutState = parts.runtime_state.state
        """What the newest checkpoint holds, or what this process began with."""
        self.longest_step_s = 0.0
        """From the claim to the commit."""

    def stop_after_step(self) -> None:
        """Have `run` return before it claims another batch, with the last step checkpointed."""
        self._stopping = True
        self._changes.notify()

    async def run(self) -> TrainingEnd:
        """Pump to the end, or until told to stop."""
        self._saved = self._parts.runtime_state.state
        while self._parts.runtime_state.state.progress.train_steps < self._config.grpo.max_steps:
            selection = await self._next_batch()
            if selection is None:
                # The checkpoint of a step that this process began with may be damaged.
                missing = not await self._snapshotter.has_anchor()
                await self._checkpoint_if(self._has_unsaved_steps() or missing)
                return TrainingEnd(why="told to stop", completed=False)
            if isinstance(selection, NothingLeft):
                await self._save_the_end()
                return TrainingEnd(why="the prompts are used up", completed=True)
            if isinstance(selection, TrainBatch):
                await self._train(selection)
            else:
                await self._skip(selection)
            await self._sync_or_save()
            last = self._config.grpo.max_steps
            step = self._parts.runtime_state.state.progress.train_steps
            await self._checkpoint_if(self._is_due() or step == last)
        return TrainingEnd(why="all steps are trained", completed=True)

    async def _sync_or_save(self) -> None:
        """Sync; when no engine is left for it, save what is trained before that ends the run."""
        try:
            await self.sync_weights()
        except EnginesLost:
            await self._save_the_end()
            raise

    async def sync_weights(self) -> None:
        """Bring the engines to the trainer's weights; they hold requests back meanwhile."""
        figures = await self._sync()
        self._rollouts.served_weight_version = figures.weight_version
        self._changes.notify()
        self._journal.write(
            WeightsSynced(
                weight_version=figures.weight_version,
                bytes=figures.bytes,
                seconds=figures.seconds,
            )
        )

    def _has_unsaved_steps(self) -> bool:
        now = self._parts.runtime_state.state.progress.train_steps
        return now > self._saved.progress.train_steps

    async def _save_the_end(self) -> None:
        """Save what happened since the last checkpoint: steps, or prompts that were only dropped.

        A step at which this process began has its checkpoint (or, before the first, its anchor).
        """
        if self._has_unsaved_steps():
            await self._checkpoint_if(True)
        elif self._parts.runtime_state.state is not self._saved:
            self._require(await self._snapshotter.save_rollout_snapshot(force=True))

    async def _next_batch(self) -> TrainBatch | SkipStep | NothingLeft | None:
        """Drop what is stale and claim the next batch, waiting until there is one. None: the pump
        is to stop."""
        cell = self._parts.runtime_state
        while not self._stopping:
            seen = self._changes.version
            if self._fleet.sync_is_due():
                await self._sync_or_save()
                continue
            await self._drop_stale()
            async with self._parts.data_plane_barrier.mutation(
                CheckpointMutationKind.OTHER
            ) as section:
                selection: Selection = self._parts.sampler.select(
                    cell.state, self._rollouts.limits()
                )
                if isinstance(selection, TrainBatch | SkipStep):
                    cell.apply(section, selection.event)
                    return selection
            match selection:
                case NothingLeft():
                    return selection
                case Wait():
                    await self._changes.wait_past(seen)
        return None

    async def _drop_stale(self) -> None:
        sampler, cell = self._parts.sampler, self._parts.runtime_state
        while next_stale_drop(sampler, cell.state, self._rollouts.limits()) is not None:
            async with self._parts.data_plane_barrier.mutation(
                CheckpointMutationKind.GROUP_REMOVAL
            ) as section:
                drop = next_stale_drop(sampler, cell.state, self._rollouts.limits())
                if drop is not None:
                    cell.apply(section, drop)
        await self._parts.buffer.clear_retired()

    async def _train(self, batch: TrainBatch) -> None:
        step, began_s = batch.event.step, asyncio.get_running_loop().time()
        replay = self._parts.runtime_state.state.replay
        groups = [replay[group_id] for group_id in batch.event.group_ids]
        prompt_ids = tuple(group.prompt.prompt_id for group in groups)
        self._journal.write(StepClaimed(step=step, prompt_ids=prompt_ids))
        rows = await self._parts.buffer.rows_of(batch.event.group_ids)
        training = [training_rows(group, rows[group.group_id]) for group in groups]
        # The long part changes nothing yet, so that snapshots can be taken meanwhile.
        metrics = await self._trainer.compute_gradients(training)
        await self._open_commit(step)
        await self._trainer.apply_gradients()
        await self._commit(step, groups, metrics)
        took_s = asyncio.get_running_loop().time() - began_s
        self.longest_step_s = max(self.longest_step_s, took_s)

    async def _skip(self, skip: SkipStep) -> None:
        """Every group of the batch was dropped: count the step, with nothing trained."""
        await self._open_commit(skip.event.step)
        await self._trainer.skip_step()
        await self._commit(skip.event.step, [], None)

    async def _open_commit(self, step: int) -> None:
        kind = CheckpointMutationKind.OTHER
        async with self._parts.data_plane_barrier.mutation(kind) as section:
            self._parts.runtime_state.apply(section, OptimizerCommitOpened(step=step))

    async def _commit(
        self, step: int, groups: Sequence[ReplayGroup], metrics: StepMetrics | None
    ) -> None:
        kind = CheckpointMutationKind.OTHER
        async with self._parts.data_plane_barrier.mutation(kind) as section:
            committed = StepCommitted(step=step, trainer_version=self._trainer.trainer_version)
            self._parts.runtime_state.apply(section, committed)
        self._journal.write(
            StepTrained(
                step=step,
                prompt_ids=tuple(group.prompt.prompt_id for group in groups),
                mean_reward=None if metrics is None else metrics.mean_reward,
                loss=None if metrics is None else metrics.loss,
                weight_versions=tuple(group.start_weight_version for group in groups),
            )
        )
        await self._parts.buffer.clear_retired()

    def _is_due(self) -> bool:
        every = self._config.checkpointing.trainer_every_steps
        return self._parts.runtime_state.state.progress.train_steps % every == 0

    async def _checkpoint_if(self, wanted: bool) -> None:
        if not wanted:
            return
        self._saved = self._parts.runtime_state.state
        self._require(await self._snapshotter.save_trainer_checkpoint(self._trainer.save))

    def _require(self, result: RolloutCheckpointSaveResult) -> None:
        if not result.saved:
            if isinstance(self._snapshotter.last_error, WorkersLost):
                raise self._snapshotter.last_error
            raise CheckpointFailed(
                f"the checkpoint failed ({result.reason}): {self._snapshotter.last_error}",
                remedy="make room or repair the file system, then start the run again:"
                " it resumes from the newest save",
            ) from self._snapshotter.last_error


def training_rows(
    group: ReplayGroup, rows: Sequence[dict[str, torch.Tensor]]
) -> tuple[TrainingRow, ...]:
    """A ready group's rows as the trainer takes them, in sibling order."""
    return tuple(
        TrainingRow(
            token_ids=row["token_ids"],
            prompt_length=int(row["prompt_length"]),
            behaviour_log_probabilities=row["behaviour_log_probabilities"],
            reward=reward,
            masked=masked,
        )
        for row, reward, masked in zip(rows, group.rewards, group.masked, strict=True)
    )
