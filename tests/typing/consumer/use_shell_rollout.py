"""`rollsync.shell.rollout` in someone else's program: save, and resume."""

from typing import assert_type

from rollsync.pure.rollout import ResumePlan, ResumePolicy, RolloutCheckpointSaveResult
from rollsync.pure.rollout.events import RolloutEvent
from rollsync.shell.rollout import (
    DataPlaneCheckpointBarrier,
    RolloutParts,
    RolloutRestorer,
    RolloutSnapshotter,
)
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.cell import StateCell
from rollsync.shell.rollout.data_plane import DataPlane, InProcessDataPlane
from rollsync.shell.rollout.restore import RestoredRollout
from rollsync.shell.store import SnapshotStore

plane: DataPlane = InProcessDataPlane()


async def save(parts: RolloutParts, store: SnapshotStore) -> bool:
    snapshotter = RolloutSnapshotter(parts, archive=store)
    result = await snapshotter.save_rollout_snapshot()
    assert_type(result, RolloutCheckpointSaveResult)
    return result.saved


async def resume(parts: RolloutParts, store: SnapshotStore, policy: ResumePolicy) -> ResumePlan:
    restored = await RolloutRestorer(parts, archive=store, policy=policy).restore()
    assert_type(restored, RestoredRollout | None)
    # There may be nothing to resume from.
    print(restored.plan)  # type: ignore[union-attr]
    assert restored is not None
    return restored.plan


async def change(cell: StateCell, barrier: DataPlaneCheckpointBarrier, event: RolloutEvent) -> None:
    async with barrier.mutation(CheckpointMutationKind.PROMPT_RESERVATION) as section:
        cell.apply(section, event)
    # A change takes place inside a section of the barrier: a save sees it whole or not at all.
    cell.apply(event)  # type: ignore[arg-type]
    # Nobody puts a state into the cell beside the events.
    cell.state = cell.state  # type: ignore[misc]
    # A section says what it is for.
    barrier.mutation("prompts")  # type: ignore[arg-type]
