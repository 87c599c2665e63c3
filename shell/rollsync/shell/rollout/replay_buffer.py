"""The replay buffer: the replay index of the state cell together with its rows in the data plane.

Rule kept here: each transfer of ownership is one barrier section that both moves rows and changes
the state, rows first where something begins to own them and state last, and a transfer that fails
in between leaves rows that nobody owns, never an owner without rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch

from rollsync.pure.rollout.events import (
    FinalizationFailed,
    FinalizationStarted,
    GroupCommitted,
    RowsCleared,
    SiblingSealed,
)
from rollsync.pure.rollout.state import FinalizedReward, ReplayGroup, owner_of, sample_id_of
from rollsync.shell.rollout.barrier import CheckpointMutationKind, DataPlaneCheckpointBarrier
from rollsync.shell.rollout.cell import StateCell
from rollsync.shell.rollout.data_plane import DataPlane, Row
from rollsync.shell.rollout.errors import DataPlaneError, RolloutTransitionError


class TQReplayBuffer:
    """Ready groups and the rows of unfinished ones.

    Args:
        cell: the run's state.
        barrier: the run's barrier; every method that changes something enters it.
        plane: where rows are.
        partition_id: the run's partition of the plane.
        capacity: most groups that may be admitted and untrained, None for no limit.
    """

    def __init__(
        self,
        cell: StateCell,
        barrier: DataPlaneCheckpointBarrier,
        plane: DataPlane,
        *,
        partition_id: str,
        capacity: int | None,
    ) -> None:
        self._cell = cell
        self._barrier = barrier
        self._plane = plane
        self.partition_id = partition_id
        self.capacity = capacity
        self._clearing = asyncio.Lock()

    @property
    def ready(self) -> tuple[ReplayGroup, ...]:
        """Groups that a step could train or holds claimed, in commit order."""
        groups = self._cell.state.replay.values()
        return tuple(sorted(groups, key=lambda group: group.commit_index))

    def __len__(self) -> int:
        return len(self._cell.state.replay)

    async def seal(self, event: SiblingSealed, rows: Mapping[str, Row]) -> None:
        """Stage the rows of an attempt that ended well and seal it, as one transfer.

        Args:
            event: names the rows in `staged_keys`.
            rows: exactly those rows.

        Raises:
            DataPlaneError: `rows` are not the event's, or were not stored.
            RolloutTransitionError: the attempt may not be sealed (any more); no row stays.
        """
        if set(rows) != set(event.staged_keys):
            raise DataPlaneError(
                f"group {event.group_id}, sibling {event.sibling_index}: rows {sorted(rows)} "
                f"given, {sorted(event.staged_keys)} named by the seal"
            )
        async with self._barrier.mutation(CheckpointMutationKind.SIBLING_SEAL) as section:
            if self._cell.preview(event) is self._cell.state:
                return  # Sealed before, with the same data.
            await self._plane.put(self.partition_id, rows)
            try:
                self._cell.apply(section, event)
            except RolloutTransitionError:
                # The attempt ended otherwise while its rows were stored.
                await self._plane.clear(self.partition_id, rows)
                raise

    async def publish(
        self,
        group_id: str,
        rows: Sequence[Row],
        *,
        lengths: Sequence[int],
        end_weight_version: int,
        metrics: Mapping[str, float] | None = None,
        rewards: Sequence[FinalizedReward] = (),
    ) -> ReplayGroup:
        """Store the finished rows of a fully sealed group and move it to the replay index.

        Args:
            rows: one row per sibling, in sibling order.
            lengths: tokens per row (prompt and completion).

        Raises:
            RolloutTransitionError: the group is not fully sealed.
            DataPlaneError: rows were not stored; the group can be published again.
        """
        event = GroupCommitted(
            group_id=group_id,
            sample_ids=tuple(sample_id_of(group_id, index) for index in range(len(rows))),
            end_weight_version=end_weight_version,
            lengths=tuple(lengths),
            metrics=tuple(sorted((metrics or {}).items())),
            rewards=tuple(rewards),
        )
        async with self._barrier.mutation(CheckpointMutationKind.GROUP_COMMIT) as section:
            self._cell.apply(section, FinalizationStarted(group_id=group_id))
            try:
                self._cell.preview(event)
                stored = dict(zip(event.sample_ids, rows, strict=True))
                await self._plane.put(self.partition_id, stored)
                self._cell.apply(section, event)
            except BaseException:
                # Nothing is indexed before the commit, so that nothing was published is a fact.
                failed = FinalizationFailed(group_id=group_id, outcome_known=True)
                self._cell.apply(section, failed)
                raise
        return self._cell.state.replay[group_id]

    async def rows_of(
        self, group_ids: Sequence[str], *, fields: Sequence[str] | None = None
    ) -> dict[str, list[dict[str, torch.Tensor]]]:
        """Rows of ready groups by group, one per sibling, in sibling order."""
        groups = [self._cell.state.replay[group_id] for group_id in group_ids]
        keys = [key for group in groups for key in group.sample_ids]
        rows = await self._plane.get(self.partition_id, keys, fields=fields)
        return {group.group_id: [dict(rows[key]) for key in group.sample_ids] for group in groups}

    async def staged_rows_of(self, group_id: str) -> list[dict[str, torch.Tensor]]:
        """Rows that a fully sealed group's siblings have staged, in sibling and key order."""
        record = self._cell.state.ledger.groups[group_id]
        keys = [
            key
            for sibling in record.siblings
            for attempt in sibling.attempts[-1:]
            for key in attempt.staged_keys
        ]
        rows = await self._plane.get(self.partition_id, keys)
        return [dict(rows[key]) for key in keys]

    async def write_back(self, rows: Mapping[str, Row]) -> None:
        """Add or replace fields (advantages, for instance) of rows that ready groups own: for a
        trainer that finds them in the data plane. Those of rollsync compute them themselves.

        Raises:
            DataPlaneError: a row that no ready group owns.
        """
        async with self._barrier.mutation(CheckpointMutationKind.ADVANTAGE_WRITE_BACK):
            foreign = [key for key in rows if not self._is_published(key)]
            if foreign:
                raise DataPlaneError(
                    f"no ready group owns rows {foreign[:5]}",
                    remedy="write back only to rows of groups that are ready or claimed",
                )
            await self._plane.put(self.partition_id, rows)

    async def clear_retired(self) -> int:
        """Clear the rows that nothing owns any more; the number of rows cleared."""
        # Two that clear at once would both find the same rows, and the second could not say so.
        async with (
            self._clearing,
            self._barrier.mutation(CheckpointMutationKind.SAMPLE_CLEAR) as section,
        ):
            keys = tuple(sorted(self._cell.state.rows_to_clear))
            if keys:
                await self._plane.clear(self.partition_id, keys)
                self._cell.apply(section, RowsCleared(keys=keys))
            return len(keys)

    def _is_published(self, key: str) -> bool:
        group = self._cell.state.replay.get(owner_of(key))
        return group is not None and key in group.sample_ids
