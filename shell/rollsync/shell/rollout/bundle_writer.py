"""Turns the value and the pin of one cut into a bundle: rows into segments, state into its file.

Rules kept here: everything that takes time runs in a thread, and is waited for also when the save
is cancelled; rows are read in chunks, so a save needs the memory of one chunk and not of the
buffer; what earlier saves wrote is remembered only after it is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from msgspec import Struct
from returns.pipeline import is_successful

from rollsync.codecs import encode
from rollsync.pure.rollout.capture import (
    Capture,
    FinalizationUnsettled,
    capture,
    describe_refusal,
)
from rollsync.pure.rollout.checkpointing import CapturedRolloutState, CheckpointKind
from rollsync.pure.rollout.inventory import describe_problem, saving_problems, take_inventory
from rollsync.pure.rollout.row_segments import RowSegments, SavedRow, plan_row_save
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.archive import (
    STATE_FILE,
    BundleDraft,
    BundleFacts,
    SnapshotArchive,
)
from rollsync.shell.rollout.captured import (
    DATA_PLANE_FILE,
    REPLAY_METADATA_FILE,
    SavingRun,
    captured_state,
    data_plane_metadata,
)
from rollsync.shell.rollout.data_plane import PinnedRows, StoredRow
from rollsync.shell.rollout.segments import encode_segment, row_bytes, saved_row
from rollsync.shell.rollout.settle import settled

_ROWS_PER_READ = 256
_SEGMENT_BYTES = 64 * 1024 * 1024


class RolloutInvariantError(RollsyncError):
    """The state contradicts itself or its rows: a resume from it would be wrong."""


class FinalizationPending(RollsyncError):
    """A finalization outside its barrier section: nobody knows yet what it published."""


class Cut(Struct, frozen=True, kw_only=True):
    """What the exclusive cut takes."""

    state: RolloutState
    mutation_version: int


class PreparedBundle(Struct, frozen=True, kw_only=True):
    """What a bundle will hold."""

    kind: CheckpointKind
    capture: Capture
    rows: dict[str, int]
    """Revision of every row, by key."""
    mutation_version: int


class WrittenBundle(Struct, frozen=True, kw_only=True):
    """What a save wrote."""

    path: Path
    captured: CapturedRolloutState
    segment_bytes: int
    """Bytes of new segments."""
    file_bytes: int
    """Bytes of the state's files."""


class BundleWriter:
    """Writes bundles of one run and shares rows between them."""

    def __init__(self, archive: SnapshotArchive) -> None:
        self._archive = archive
        self._saved = RowSegments(rows={}, row_counts={})

    def remember(self, saved: RowSegments) -> None:
        """Take over what a restore has read, so that the next save shares it."""
        self._saved = saved

    async def prepare(self, cut: Cut, pinned: PinnedRows, kind: CheckpointKind) -> PreparedBundle:
        """Decide what is kept of the cut, and check that the rows are there.

        Raises:
            RolloutInvariantError: the state must not be saved.
            FinalizationPending: it may not be saved now.
        """
        kept = await settled(asyncio.to_thread(_captured, cut.state, kind))
        rows = pinned.revisions((*kept.replay_rows, *kept.staging_rows))
        await settled(asyncio.to_thread(_check, kept, rows))
        return PreparedBundle(
            kind=kind, capture=kept, rows=rows, mutation_version=cut.mutation_version
        )

    async def write(
        self,
        prepared: PreparedBundle,
        pinned: PinnedRows,
        draft: BundleDraft,
        *,
        run: SavingRun,
        published: Callable[[WrittenBundle], None],
    ) -> None:
        """Write and publish `draft`.

        Args:
            published: called as soon as the bundle has its name, also when the caller is cancelled
                meanwhile.

        Raises:
            OSError, DataPlaneError: nothing was published.
        """
        clock = asyncio.get_running_loop().time
        started_s = clock()
        rows, segment_bytes = await self._write_rows(prepared.rows, pinned)
        rows_save_s = clock() - started_s
        captured = await settled(
            asyncio.to_thread(
                captured_state,
                prepared.capture,
                rows.rows,
                run,
                mutation_version=prepared.mutation_version,
                rows_save_s=rows_save_s,
            )
        )
        files = await settled(asyncio.to_thread(_files, captured, run, prepared.kind))
        state = captured.state
        facts = BundleFacts(
            kind=prepared.kind,
            base_train_step=state.progress.train_steps,
            trainer_version=state.progress.trainer_version,
            current_epoch=state.progress.current_epoch,
            sampler_dispatch_index=state.sampler_dispatch_index,
            mutation_version=prepared.mutation_version,
            rolled_back_train_group_count=prepared.capture.rolled_back_train_group_count,
            environment_fingerprint=run.environment_fingerprint,
            segments=tuple(rows.row_counts),
        )

        async def publish() -> None:
            path = await asyncio.to_thread(draft.publish, facts, files)
            # Only now: of segments that no bundle lists, retention may remove any.
            self._saved = rows
            published(
                WrittenBundle(
                    path=path,
                    captured=captured,
                    segment_bytes=segment_bytes,
                    file_bytes=sum(len(data) for data in files.values()),
                )
            )

        await settled(publish())

    async def _write_rows(
        self, needed: dict[str, int], pinned: PinnedRows
    ) -> tuple[RowSegments, int]:
        """Segments that hold the needed rows, oldest first, and the bytes of the new ones."""
        plan = await settled(asyncio.to_thread(plan_row_save, needed, self._saved))
        segments = _NewSegments(self._archive, needed)
        for start in range(0, len(plan.write), _ROWS_PER_READ):
            segments.add(await pinned.get(plan.write[start : start + _ROWS_PER_READ]))
            if segments.pending_bytes >= _SEGMENT_BYTES:
                await settled(asyncio.to_thread(segments.flush))
        await settled(asyncio.to_thread(segments.flush))
        counts = {name: self._saved.row_counts[name] for name in plan.keep}
        rows = {key: row for key, row in self._saved.rows.items() if row.segment in counts}
        for name, written in segments.written.items():
            counts.pop(name, None)  # Written again with equal content: it is the newest now.
            counts[name] = len(written)
            rows.update(written)
        return RowSegments(rows=rows, row_counts=counts), segments.written_bytes


class _NewSegments:
    """Collects rows and writes them when there are enough. `flush` blocks."""

    def __init__(self, archive: SnapshotArchive, revisions: Mapping[str, int]) -> None:
        self._archive = archive
        self._revisions = revisions
        self._pending: dict[str, StoredRow] = {}
        self.pending_bytes = 0
        self.written: dict[str, dict[str, SavedRow]] = {}
        """Rows by key, by segment."""
        self.written_bytes = 0

    def add(self, rows: dict[str, StoredRow]) -> None:
        self._pending.update(rows)
        self.pending_bytes += sum(row_bytes(row) for row in rows.values())

    def flush(self) -> None:
        if not self._pending:
            return
        data = encode_segment(self._pending)
        name = self._archive.put_segment(data)
        self.written[name] = {
            key: saved_row(row, segment=name, revision=self._revisions[key])
            for key, row in self._pending.items()
        }
        self.written_bytes += len(data)
        self._pending = {}
        self.pending_bytes = 0


def _captured(state: RolloutState, kind: CheckpointKind) -> Capture:
    kept = capture(state, kind)
    if is_successful(kept):
        return kept.unwrap()
    refused = kept.failure()
    if isinstance(refused, FinalizationUnsettled):
        raise FinalizationPending(describe_refusal(refused))
    raise RolloutInvariantError(describe_refusal(refused))


def _check(kept: Capture, rows_there: Collection[str]) -> None:
    problems = saving_problems(take_inventory(kept.state, rows_there))
    if problems:
        raise RolloutInvariantError(
            f"{len(problems)} problems, first: {describe_problem(problems[0])}",
            remedy="stop the run: a resume from this state would be wrong",
        )


def _files(
    captured: CapturedRolloutState, run: SavingRun, kind: CheckpointKind
) -> dict[str, bytes]:
    return {
        STATE_FILE: encode(captured.state),
        REPLAY_METADATA_FILE: encode(captured.replay_metadata),
        DATA_PLANE_FILE: encode(data_plane_metadata(captured, run, kind)),
    }
