"""Saves rollout state: snapshots between trainer checkpoints, and the state of those.

Rules kept here:

1. One lock: no two saves at a time, of whatever kind.
2. The exclusive cut takes the current value and pins the rows, and nothing else; the cost of a save
   lies outside it.
3. What was decided before the cut (window, step, version) is looked at again inside it.
4. A save that did not succeed leaves nothing that makes a later one skip.
5. A save reports how it ended as a `RolloutCheckpointSaveResult`; it raises only when cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from rollsync.pure.rollout.checkpointing import (
    CheckpointKind,
    RolloutCheckpointAttemptReason,
    RolloutCheckpointOutcome,
    RolloutCheckpointSaveResult,
    RolloutTraceKind,
)
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.rollout.archive import ENVIRONMENT_DIRECTORY, BundleDraft, SnapshotArchive
from rollsync.shell.rollout.bundle_writer import BundleWriter, WrittenBundle
from rollsync.shell.rollout.captured import SavingRun, name_of
from rollsync.shell.rollout.data_plane import PinnedRows
from rollsync.shell.rollout.environments import EnvironmentResumeError, EnvironmentSaveError
from rollsync.shell.rollout.errors import DataPlaneError
from rollsync.shell.rollout.kept import Cut, FinalizationPending, RolloutInvariantError
from rollsync.shell.rollout.parts import RolloutParts, _UsesRolloutParts
from rollsync.shell.rollout.settle import settled
from rollsync.shell.rollout.touched import TouchedGroups

_logger = logging.getLogger(__name__)

WriteTrainerFiles = Callable[[Path], Awaitable[None]]
"""Writes the trainer's own files into the unpublished checkpoint directory."""

SaveListener = Callable[[CheckpointKind, int, RolloutCheckpointSaveResult], None]
"""Told of each attempt: what was to be saved, after how many steps, and how it ended."""

Reason = RolloutCheckpointAttemptReason
Outcome = RolloutCheckpointOutcome


class _Skipped(Exception):
    """Ends an attempt that is not to be made now."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class _Attempt(Struct, kw_only=True):
    """One save on its way."""

    kind: CheckpointKind
    write_trainer_files: WriteTrainerFiles | None
    before: RolloutState
    """The state that the decision to save was made on."""
    written: WrittenBundle | None = None
    """What was published, as soon as it was."""


class RolloutSnapshotter(_UsesRolloutParts):
    """Saves a run's rollout state.

    Args:
        parts: the run's parts.
        archive: where bundles go.
        writer: shared with the restorer, so that a resumed run shares the rows it has read.
        before_publication: called (in a thread) after the cut and before a bundle gets its name:
            makes durable what else is told of the saved state.
        ended: told how each attempt ended.
    """

    def __init__(
        self,
        parts: RolloutParts,
        *,
        archive: SnapshotArchive,
        writer: BundleWriter | None = None,
        before_publication: Callable[[], None] = lambda: None,
        ended: SaveListener | None = None,
    ) -> None:
        super().__init__(parts)
        self._archive = archive
        self._before_publication = before_publication
        self._tell_ended = ended
        self._save_timeout_s = parts.master_config.checkpointing.save_timeout_s
        self._writer = BundleWriter(archive) if writer is None else writer
        self._touched = TouchedGroups(self._cell)
        self._lock = asyncio.Lock()
        self._saved_version: int | None = None
        self.last_error: BaseException | None = None
        """What ended the last failed attempt."""
        self.longest_save_s = 0.0

    async def save_rollout_snapshot(self, *, force: bool = False) -> RolloutCheckpointSaveResult:
        """Save a snapshot under the anchor of the current step.

        Args:
            force: save also when nothing has changed since the last save.
        """
        return await self._attempt(CheckpointKind.ROLLOUT_SNAPSHOT, force=force)

    async def save_trainer_checkpoint(
        self, write_trainer_files: WriteTrainerFiles
    ) -> RolloutCheckpointSaveResult:
        """Save the trainer's files and the rollout state of the same step, published together.

        Args:
            write_trainer_files: called once, after the cut, with the unpublished directory. The
                trainer must not step before this call has returned.
        """
        return await self._attempt(
            CheckpointKind.TRAINER_CHECKPOINT, force=True, write_trainer_files=write_trainer_files
        )

    async def has_anchor(self) -> bool:
        """Whether there is a checkpoint of the current step, whole, for snapshots to lie under."""
        async with self._lock:
            return await self._has_anchor(self._cell.state.progress.train_steps)

    async def _has_anchor(self, train_steps: int) -> bool:
        return await settled(asyncio.to_thread(self._archive.has_anchor, train_steps))

    async def _attempt(
        self,
        kind: CheckpointKind,
        *,
        force: bool,
        write_trainer_files: WriteTrainerFiles | None = None,
    ) -> RolloutCheckpointSaveResult:
        clock = asyncio.get_running_loop().time
        async with self._lock:
            started_s = clock()
            self._trace.begin(RolloutTraceKind.SAVE_STARTED, kind)
            attempt = _Attempt(
                kind=kind, write_trainer_files=write_trainer_files, before=self._cell.state
            )
            try:
                async with asyncio.timeout(self._save_timeout_s):
                    await self._decide(attempt, force=force)
                    await self._save(attempt)
                reason = Reason.COMPLETED
            except _Skipped as skipped:
                reason = skipped.reason
            except Exception as error:
                reason = self._failed(error)
                if reason is Reason.TIMEOUT and attempt.written is not None:
                    reason = Reason.COMPLETED  # Time ran out after the bundle had its name.
            took_s = clock() - started_s
            if attempt.written is not None:
                self.longest_save_s = max(self.longest_save_s, took_s)
                await self._prune()
            return self._ended(attempt, reason, took_s)

    async def _decide(self, attempt: _Attempt, *, force: bool) -> None:
        """Whether to save at all, in the order that the reasons have."""
        state = attempt.before
        if state.open_step is not None and state.open_step.optimizer_commit_open:
            raise _Skipped(Reason.OPTIMIZER_COMMIT_IN_PROGRESS)
        if not force and self._saved_version == self._barrier.mutation_version:
            raise _Skipped(Reason.NO_DATA_PLANE_MUTATIONS)
        if self._read_progress() != state.progress:
            raise _Skipped(Reason.TRAINER_STATE_CHANGED)
        needs_anchor = attempt.kind is CheckpointKind.ROLLOUT_SNAPSHOT
        if needs_anchor and not await self._has_anchor(state.progress.train_steps):
            raise _Skipped(Reason.MISSING_TRAINER_ANCHOR)

    async def _save(self, attempt: _Attempt) -> None:
        async with self._draft(attempt) as draft:
            part_path = draft.path / ENVIRONMENT_DIRECTORY
            async with self._environment.snapshot(part_path) as part:
                if part is not None:
                    self._trace.record(
                        RolloutTraceKind.ENVIRONMENT_PAUSED,
                        attempt.kind,
                        f"{len(part.episodes)} episodes",
                    )
                cut, pinned = await self._take_cut(attempt)
                try:
                    if part is not None:
                        await part.check_against_cut(cut.state)
                    await self._write(attempt, cut, pinned, draft)
                finally:
                    pinned.release()
            if part is not None:
                self._trace.record(RolloutTraceKind.ENVIRONMENT_RESUMED, attempt.kind)

    @asynccontextmanager
    async def _draft(self, attempt: _Attempt) -> AsyncIterator[BundleDraft]:
        """A draft that is thrown away at the end, unless it was published."""
        begun: list[BundleDraft] = []

        async def begin() -> None:
            step = attempt.before.progress.train_steps
            begun.append(await asyncio.to_thread(self._archive.begin, attempt.kind, step))

        try:
            await settled(begin())
            yield begun[0]
        finally:
            for draft in begun:
                await settled(asyncio.to_thread(draft.abandon))

    async def _write(
        self, attempt: _Attempt, cut: Cut, pinned: PinnedRows, draft: BundleDraft
    ) -> None:
        prepared = await self._writer.prepare(cut, pinned, attempt.kind)
        pinned.release()
        if attempt.write_trainer_files is not None:
            await attempt.write_trainer_files(draft.path)
            if not _same_weights(self._cell.state, cut.state):
                raise _Skipped(Reason.TRAINER_STATE_CHANGED)

        await settled(asyncio.to_thread(self._before_publication))

        def published(written: WrittenBundle) -> None:
            attempt.written = written
            self._saved_version = cut.mutation_version
            self._touched.saved(cut.touched)
            self._trace.record(RolloutTraceKind.PUBLISHED, str(written.path))

        await self._writer.write(
            prepared,
            draft,
            run=SavingRun(
                partition_id=self._partition_id,
                sampler_name=name_of(self._sampler),
                buffer_capacity=self._buffer.capacity,
                environment_fingerprint=self._environment.fingerprint,
            ),
            published=published,
        )

    async def _take_cut(self, attempt: _Attempt) -> tuple[Cut, PinnedRows]:
        async with self._barrier.checkpoint() as exclusive:
            state, before = self._cell.state, attempt.before
            window_open = state.open_step is not None and state.open_step.optimizer_commit_open
            if window_open or not _same_weights(state, before):
                raise _Skipped(Reason.TRAINER_STATE_CHANGED)
            pinned = self._dp_client.pin(self._partition_id)
            cut = Cut(
                state=state,
                mutation_version=exclusive.mutation_version,
                touched=self._touched.cut(),
            )
            self._trace.record(RolloutTraceKind.CUT_TAKEN, attempt.kind)
        self._trace.record(RolloutTraceKind.CUT_LEFT, attempt.kind)
        return cut, pinned

    def _failed(self, error: Exception) -> Reason:
        """The reason of a failure. A timeout is an OSError too, so it comes first."""
        self.last_error = error
        match error:
            case EnvironmentResumeError():
                self._rollout_manager.close_admission(str(error))
                return Reason.INVARIANT_ERROR
            case TimeoutError():
                return Reason.TIMEOUT
            case OSError() | DataPlaneError() | EnvironmentSaveError() | FinalizationPending():
                return Reason.IO_ERROR
            case RolloutInvariantError():
                return Reason.INVARIANT_ERROR
            case _:
                # A store that refuses (another run's directory), or a bug: another attempt would
                # end the same, and a run that cannot be saved is not to go on unnoticed.
                return Reason.INVARIANT_ERROR

    async def _prune(self) -> None:
        """Retire old bundles. An error is written down and changes nothing."""
        try:
            gone = await settled(asyncio.to_thread(self._archive.prune))
        except OSError as error:
            _logger.warning("old rollout snapshots were not removed: %s", error)
            self._trace.record(RolloutTraceKind.PRUNED, "failed", str(error))
            return
        for name in gone:
            self._trace.record(RolloutTraceKind.PRUNED, name)

    def _ended(
        self, attempt: _Attempt, reason: Reason, took_s: float
    ) -> RolloutCheckpointSaveResult:
        written = attempt.written
        detail = str(self.last_error) if reason.outcome is Outcome.FAILED else ""
        self._trace.record(RolloutTraceKind.SAVE_ENDED, f"{attempt.kind} {reason}", detail)
        if detail:
            _logger.error("%s failed (%s): %s", attempt.kind, reason, detail)
        metrics = {
            f"rollout_checkpoint/{reason.outcome}": 1.0,
            f"rollout_checkpoint/reason/{reason}": 1.0,
            "rollout_checkpoint/save_s": took_s,
        }
        if written is not None:
            kept = written.captured
            metrics |= {
                "rollout_checkpoint/segment_bytes": float(written.segment_bytes),
                "rollout_checkpoint/state_bytes": float(written.state_bytes),
                "rollout_checkpoint/file_bytes": float(written.file_bytes),
                "rollout_checkpoint/replay_rows": float(kept.replay_row_count),
                "rollout_checkpoint/staging_rows": float(kept.staging_row_count),
            }
        self._log_metrics(metrics)
        result = RolloutCheckpointSaveResult(saved=written is not None, reason=reason)
        if self._tell_ended is not None:
            self._tell_ended(attempt.kind, attempt.before.progress.train_steps, result)
        return result


def _same_weights(one: RolloutState, other: RolloutState) -> bool:
    """Whether no step was trained in between. (The epoch may have turned: prompts are handed out
    at any time, also while a checkpoint is written.)"""
    now, then = one.progress, other.progress
    return (now.train_steps, now.trainer_version) == (then.train_steps, then.trainer_version)
