"""Turns the value and the pin of one cut into a bundle: rows and state into segments.

Rules kept here: everything that takes time runs in a thread, and is waited for also when the save
is cancelled; rows are read in chunks, so a save needs the memory of one chunk and not of the
buffer; what earlier saves wrote is remembered only after it is durable, and a save then adds to it
what has changed since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from rollsync.codecs import encode
from rollsync.pure.rollout.checkpointing import CapturedRolloutState, CheckpointKind
from rollsync.pure.rollout.newest import NewestPart, part_of_difference, part_of_whole
from rollsync.pure.rollout.row_segments import (
    RowSegments,
    SavedRow,
    after_save,
    nothing_saved,
    plan_row_save,
)
from rollsync.pure.snapshot.chain import extends
from rollsync.pure.snapshot.manifest import SnapshotSegment
from rollsync.shell.rollout.archive import BundleDraft, BundleFacts, SnapshotArchive
from rollsync.shell.rollout.captured import (
    DATA_PLANE_FILE,
    REPLAY_METADATA_FILE,
    SavingRun,
    captured_state,
    data_plane_metadata,
)
from rollsync.shell.rollout.data_plane import PinnedRows, StoredRow
from rollsync.shell.rollout.kept import Cut, Kept, LastSave, keep
from rollsync.shell.rollout.segments import encode_segment, row_bytes, saved_row
from rollsync.shell.rollout.settle import settled

_ROWS_PER_READ = 256
_SEGMENT_BYTES = 64 * 1024 * 1024


class _WrittenRows(Struct, frozen=True, kw_only=True):
    """The needed rows, all in segments."""

    rows: RowSegments
    new_bytes: int
    """Of the segments that were not there before."""
    took_s: float


class PreparedBundle(Struct, frozen=True, kw_only=True):
    """What a bundle will hold: its rows are durable, and the pin is not needed any more."""

    kind: CheckpointKind
    kept: Kept
    cut: Cut
    rows: _WrittenRows
    writes: int
    """To the pinned partition, as `PinnedRows.writes` says."""


class WrittenBundle(Struct, frozen=True, kw_only=True):
    """What a save wrote."""

    path: Path
    captured: CapturedRolloutState
    segment_bytes: int
    """Bytes of new row segments."""
    state_bytes: int
    """Bytes of the new link of the state's chain."""
    file_bytes: int
    """Bytes of the bundle's own files about state and rows."""


class _Link(Struct, frozen=True, kw_only=True):
    """The newest link of the state's chain, written."""

    chain: tuple[SnapshotSegment, ...]
    """It is the last one."""
    newest: NewestPart


class BundleWriter:
    """Writes bundles of one run and shares segments between them."""

    def __init__(self, archive: SnapshotArchive) -> None:
        self._archive = archive
        self._rows = nothing_saved()
        self._before: LastSave | None = None

    def remember(self, rows: RowSegments) -> None:
        """Take over the rows that a restore has read, so that the next save shares them. It writes
        the whole state."""
        self._rows = rows
        self._before = None

    async def prepare(self, cut: Cut, pinned: PinnedRows, kind: CheckpointKind) -> PreparedBundle:
        """Decide what is kept of the cut, check that the rows are there, and make them durable.

        All that needs the pin: where a row that is pinned cannot be cleared, somebody may wait.

        Raises:
            RolloutInvariantError: the state must not be saved.
            FinalizationPending: it may not be saved now.
            OSError, DataPlaneError: rows were not saved.
        """
        kept = await settled(
            asyncio.to_thread(
                keep, cut, pinned, kind, before=self._before, saved_rows=self._rows.rows
            )
        )
        rows = await self._write_rows(kept, pinned)
        return PreparedBundle(kind=kind, kept=kept, cut=cut, rows=rows, writes=pinned.writes)

    async def write(
        self,
        prepared: PreparedBundle,
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
            OSError: nothing was published.
        """
        before, self._before = self._before, None  # After a save that fails, all is written anew.
        chain = () if before is None else before.chain

        async def publish() -> None:
            newest, written = await asyncio.to_thread(self._publish, prepared, chain, draft, run)
            # Only now: of segments that no bundle lists, retention may remove any.
            self._rows = prepared.rows.rows
            self._before = LastSave(
                state=prepared.kept.state,
                chain=newest,
                replay_row_count=prepared.kept.replay_row_count,
                writes=prepared.writes,
                restores=prepared.cut.touched.restores,
            )
            published(written)

        await settled(publish())

    def _publish(
        self,
        prepared: PreparedBundle,
        chain: tuple[SnapshotSegment, ...],
        draft: BundleDraft,
        run: SavingRun,
    ) -> tuple[tuple[SnapshotSegment, ...], WrittenBundle]:
        """Write what is left and give the draft its name. The state's chain then, of which `chain`
        was before. Blocks."""
        kept, rows = prepared.kept, prepared.rows
        link = self._write_link(kept, chain, prepared.kind)
        captured = captured_state(
            kept.state,
            link.newest,
            rows.rows.rows,
            run,
            replay_row_count=kept.replay_row_count,
            rolled_back_train_group_count=kept.rolled_back_train_group_count,
            mutation_version=prepared.cut.mutation_version,
            rows_save_s=rows.took_s,
        )
        files = {
            REPLAY_METADATA_FILE: encode(captured.replay_metadata),
            DATA_PLANE_FILE: encode(data_plane_metadata(captured, run, prepared.kind)),
        }
        path = draft.publish(_facts(prepared, run, rows.rows, link.chain), files)
        return link.chain, WrittenBundle(
            path=path,
            captured=captured,
            segment_bytes=rows.new_bytes,
            state_bytes=link.chain[-1].size_bytes,
            file_bytes=sum(len(data) for data in files.values()),
        )

    def _write_link(
        self, kept: Kept, chain: tuple[SnapshotSegment, ...], kind: CheckpointKind
    ) -> _Link:
        """Make the newest link durable: what has changed since `chain`, or the whole state."""
        if kept.change is not None:
            data = encode(kept.change)
            if extends(chain, len(data), kind):
                return _Link(
                    chain=(*chain, self._put(data)), newest=part_of_difference(kept.change)
                )
        return _Link(chain=(self._put(encode(kept.state)),), newest=part_of_whole(kept.state))

    def _put(self, data: bytes) -> SnapshotSegment:
        return SnapshotSegment(digest=self._archive.put_segment(data), size_bytes=len(data))

    async def _write_rows(self, kept: Kept, pinned: PinnedRows) -> _WrittenRows:
        """Make durable what no segment has yet of the needed rows."""
        clock = asyncio.get_running_loop().time
        started_s = clock()
        plan = await settled(
            asyncio.to_thread(plan_row_save, kept.rows, self._rows, gone=kept.gone)
        )
        segments = _NewSegments(self._archive, plan.write)
        keys = list(plan.write)
        for start in range(0, len(keys), _ROWS_PER_READ):
            segments.add(await pinned.get(keys[start : start + _ROWS_PER_READ]))
            if segments.pending_bytes >= _SEGMENT_BYTES:
                await settled(asyncio.to_thread(segments.flush))
        await settled(asyncio.to_thread(segments.flush))
        rows = await settled(asyncio.to_thread(after_save, plan, self._rows, segments.written))
        return _WrittenRows(rows=rows, new_bytes=segments.written_bytes, took_s=clock() - started_s)


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


def _facts(
    prepared: PreparedBundle,
    run: SavingRun,
    rows: RowSegments,
    chain: tuple[SnapshotSegment, ...],
) -> BundleFacts:
    state = prepared.kept.state
    return BundleFacts(
        kind=prepared.kind,
        base_train_step=state.progress.train_steps,
        trainer_version=state.progress.trainer_version,
        current_epoch=state.progress.current_epoch,
        sampler_dispatch_index=state.sampler_dispatch_index,
        mutation_version=prepared.cut.mutation_version,
        rolled_back_train_group_count=prepared.kept.rolled_back_train_group_count,
        environment_fingerprint=run.environment_fingerprint,
        segments=tuple(segment.name for segment in rows.segments),
        state_segments=tuple(segment.digest for segment in chain),
    )
