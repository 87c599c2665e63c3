"""What a save keeps of a cut: looked at as far as it may differ from the save before, or whole.

Rule kept here: a state that contradicts itself or its rows is not saved. All of it is looked at for
a trainer checkpoint, for the first save of a process, and by a restore (`validation`); in between,
a save looks at what was touched since the one before, which was right.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct
from msgspec.structs import replace
from returns.pipeline import is_successful

from rollsync.pure.rollout.capture import (
    Capture,
    FinalizationUnsettled,
    capture,
    describe_refusal,
)
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.rollout.diff import RolloutStateDiff, diff
from rollsync.pure.rollout.inventory import (
    describe_problem,
    owned_rows,
    saving_problems,
    take_inventory,
)
from rollsync.pure.rollout.state import RolloutState, owner_of
from rollsync.pure.rollout.touched import claimed_groups, part_of, spare_prompts
from rollsync.pure.snapshot.manifest import SnapshotSegment
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.data_plane import PinnedRows
from rollsync.shell.rollout.touched import TouchedAtCut


class RolloutInvariantError(RollsyncError):
    """The state contradicts itself or its rows: a resume from it would be wrong."""


class FinalizationPending(RollsyncError):
    """A finalization outside its barrier section: nobody knows yet what it published."""


class Cut(Struct, frozen=True, kw_only=True):
    """What the exclusive cut takes."""

    state: RolloutState
    mutation_version: int
    touched: TouchedAtCut
    """Since the last save of this process."""


class LastSave(Struct, frozen=True, kw_only=True):
    """What the next save adds to."""

    state: RolloutState
    chain: tuple[SnapshotSegment, ...]
    """Of `state`, on disk."""
    replay_row_count: int
    writes: int
    """Of rows, at its pin."""
    restores: int
    """Of the cell, at its cut."""


class Kept(Struct, frozen=True, kw_only=True):
    """What a save keeps."""

    state: RolloutState
    """Claims are rolled back in it."""
    change: RolloutStateDiff | None
    """From the save before; None when the whole state was looked at."""
    rolled_back_train_group_count: int
    rows: dict[str, int]
    """Revision of every row that may be new or changed, by key."""
    replay_row_count: int
    """Of the whole state."""
    gone: tuple[str, ...]
    """Rows that the save before may have needed, and that the state has no more."""


def keep(
    cut: Cut,
    pinned: PinnedRows,
    kind: CheckpointKind,
    *,
    before: LastSave | None,
    saved_rows: Collection[str],
) -> Kept:
    """Decide what is kept of the cut, and check that it may be. Blocks.

    Args:
        before: the last save of this process.
        saved_rows: rows that the last save needed.

    Raises:
        RolloutInvariantError: the state must not be saved.
        FinalizationPending: it may not be saved now.
    """
    if (
        before is None
        or before.restores != cut.touched.restores
        or kind is CheckpointKind.TRAINER_CHECKPOINT
    ):
        return _keep_whole(cut, pinned, kind, saved_rows)
    return _keep_touched(cut, pinned, kind, before)


def _keep_whole(
    cut: Cut, pinned: PinnedRows, kind: CheckpointKind, saved_rows: Collection[str]
) -> Kept:
    kept = _captured(cut.state, kind)
    return Kept(
        state=kept.state,
        change=None,
        rolled_back_train_group_count=kept.rolled_back_train_group_count,
        rows=_checked_rows(kept, pinned),
        replay_row_count=len(kept.replay_rows),
        gone=tuple(saved_rows),
    )


def _keep_touched(cut: Cut, pinned: PinnedRows, kind: CheckpointKind, before: LastSave) -> Kept:
    ids = set(cut.touched.groups())
    ids.update(claimed_groups(cut.state), spare_prompts(cut.state))
    # Rows are also written without an event: advantages, for instance.
    ids.update(map(owner_of, pinned.written_since(before.writes)))
    then = part_of(before.state, ids)
    now = _captured(part_of(cut.state, ids), kind)
    replay_rows_then = sum(len(group.sample_ids) for group in then.replay.values())
    return Kept(
        state=replace(cut.state, open_step=None),
        change=diff(then, now.state),
        rolled_back_train_group_count=now.rolled_back_train_group_count,
        rows=_checked_rows(now, pinned),
        replay_row_count=before.replay_row_count - replay_rows_then + len(now.replay_rows),
        gone=owned_rows(then),
    )


def _captured(state: RolloutState, kind: CheckpointKind) -> Capture:
    kept = capture(state, kind)
    if is_successful(kept):
        return kept.unwrap()
    refused = kept.failure()
    if isinstance(refused, FinalizationUnsettled):
        raise FinalizationPending(describe_refusal(refused))
    raise RolloutInvariantError(describe_refusal(refused))


def _checked_rows(kept: Capture, pinned: PinnedRows) -> dict[str, int]:
    rows = pinned.revisions((*kept.replay_rows, *kept.staging_rows))
    problems = saving_problems(take_inventory(kept.state, rows))
    if problems:
        raise RolloutInvariantError(
            f"{len(problems)} problems, first: {describe_problem(problems[0])}",
            remedy="stop the run: a resume from this state would be wrong",
        )
    return rows
