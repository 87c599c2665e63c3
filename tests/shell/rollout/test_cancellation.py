"""Cancellation at every await: of a section, a cut, a save, a restore, a transfer of ownership.

What is cancelled leaves the run as if it had not been asked for, or had been done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from rollsync.pure.rollout.capture import capture
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.rollout.inventory import saving_problems, take_inventory
from rollsync.pure.rollout.state import PromptGroupStatus
from rollsync.shell.rollout.barrier import CheckpointMutationKind, DataPlaneCheckpointBarrier
from rollsync.shell.rollout.data_plane import InProcessDataPlane, PinnedRows, Row
from rollsync.shell.rollout.data_plane.protocol import Tags
from rollsync.shell.rollout.errors import DataPlaneError
from tests.pure.rollout.events_kit import dispatch, seal, train
from tests.shell.rollout.cancelling import is_cancelled_at, is_free
from tests.shell.rollout.test_turn_level import episode, game
from tests.shell.rollout.world import PARTITION, World, assert_same_rows, row_of

OTHER = CheckpointMutationKind.OTHER


class FarPlane(InProcessDataPlane):
    """Answers a little later, as a plane in other processes does: a call may be cancelled before
    anything was done, or after all was. Remembers its pins."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: list[PinnedRows] = []

    async def put(
        self,
        partition_id: str,
        rows: Mapping[str, Row],
        *,
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        await asyncio.sleep(0)
        await super().put(partition_id, rows, tags=tags)
        await asyncio.sleep(0)

    async def get(
        self, partition_id: str, keys: Sequence[str], *, fields: Sequence[str] | None = None
    ) -> dict[str, Row]:
        await asyncio.sleep(0)
        return await super().get(partition_id, keys, fields=fields)

    async def list_rows(self, partition_id: str) -> dict[str, Tags]:
        await asyncio.sleep(0)
        return await super().list_rows(partition_id)

    async def clear(self, partition_id: str, keys: Iterable[str]) -> None:
        await asyncio.sleep(0)
        await super().clear(partition_id, keys)
        await asyncio.sleep(0)

    def pin(self, partition_id: str) -> PinnedRows:
        self.pins.append(super().pin(partition_id))
        return self.pins[-1]

    def pins_that_hold(self) -> int:
        """How many are not released."""
        return sum(not is_released(pin) for pin in self.pins)


def is_released(pin: PinnedRows) -> bool:
    try:
        pin.revisions(())
    except DataPlaneError as error:
        return "released" in error.message
    return False


@pytest.mark.asyncio
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("beside", ["nobody", "a mutation", "a cut"])
async def test_a_visit_cancelled_at_every_await_leaves_the_place_free(
    exclusive: bool, beside: str
) -> None:
    at = 0
    while True:
        barrier = DataPlaneCheckpointBarrier()
        others: dict[str, AbstractAsyncContextManager[object]] = {
            "a mutation": barrier.mutation(OTHER),
            "a cut": barrier.checkpoint(),
        }

        async def visit(barrier: DataPlaneCheckpointBarrier = barrier) -> None:
            async with barrier.checkpoint() if exclusive else barrier.mutation(OTHER):
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        async def stay(other: AbstractAsyncContextManager[object]) -> None:
            async with other:
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        staying = asyncio.create_task(stay(others[beside])) if beside in others else None
        await asyncio.sleep(0)
        cancelled = await is_cancelled_at(at, visit())
        if staying is not None:
            await staying
        assert await is_free(barrier)
        if not cancelled:
            break
        at += 1
    waits = beside == "a cut" or (beside == "a mutation" and exclusive)
    assert at == 2 + waits


async def prepared(root: Path, plane: FarPlane) -> World:
    """A run that has saved once, and has more to save."""
    world = World(root, plane=plane)
    await world.ready(0)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    await world.ready(1)
    await world.admit(2)
    await world.seal("e0p2", 0)
    return world


async def assert_can_save(world: World, plane: FarPlane) -> None:
    """Nobody is inside, nothing is pinned or half written, and the next save holds everything."""
    assert await is_free(world.barrier)
    assert plane.pins_that_hold() == 0
    assert not (world.archive.root / "draft").exists()
    before = len(world.archive.bundles())
    assert (await world.snapshotter.save_rollout_snapshot(force=True)).saved
    assert len(world.archive.bundles()) == before + 1
    after = World(world.archive.root)
    assert await after.restore() is not None
    expected = capture(world.state, CheckpointKind.ROLLOUT_SNAPSHOT).unwrap().state
    assert after.state.replay == expected.replay
    assert set(after.state.ledger.groups) == set(expected.ledger.groups)
    held = await world.rows()
    assert_same_rows(await after.rows(), {key: held[key] for key in await after.rows()})


@pytest.mark.asyncio
async def test_a_snapshot_cancelled_at_every_await_leaves_the_run_able_to_save(
    tmp_path: Path,
) -> None:
    at, cancelled = 0, True
    while cancelled:
        plane = FarPlane()
        world = await prepared(tmp_path / str(at), plane)
        cancelled = await is_cancelled_at(at, world.snapshotter.save_rollout_snapshot())
        await assert_can_save(world, plane)
        at += 1
    assert at > 10


@pytest.mark.asyncio
async def test_a_checkpoint_cancelled_at_every_await_leaves_the_run_able_to_save(
    tmp_path: Path,
) -> None:
    async def write(directory: Path) -> None:
        (directory / "half").write_bytes(b"h")
        await asyncio.sleep(0)
        (directory / "whole").write_bytes(b"w")

    at, cancelled = 0, True
    while cancelled:
        plane = FarPlane()
        world = await prepared(tmp_path / str(at), plane)
        await world.do(*train(world.state, "e0p0"))
        world.archive.anchors.add(1)
        cancelled = await is_cancelled_at(at, world.snapshotter.save_trainer_checkpoint(write))
        await assert_can_save(world, plane)
        checkpoints = [each for each in world.archive.bundles() if (each / "half").exists()]
        assert all((each / "whole").exists() for each in checkpoints)
        at += 1
    assert at > 10


@pytest.mark.asyncio
async def test_a_save_cancelled_at_every_await_lets_the_environment_go_on(tmp_path: Path) -> None:
    async with game() as playing:
        at, cancelled = 0, True
        while cancelled:
            world = World(tmp_path / str(at), environment=playing)
            await world.admit(0)
            await world.do(dispatch("e0p0", 0))
            await playing.begin(episode("e0p0", 0), secret=42, turns=5)
            assert (await playing.guess(episode("e0p0", 0), 10)).turn == 1
            cancelled = await is_cancelled_at(at, world.snapshotter.save_rollout_snapshot())
            async with asyncio.timeout(30):
                turn = await playing.guess(episode("e0p0", 0), 20)
            assert turn.turn == 2, "the game is where it was, and is not paused"
            assert world.manager.closed == []
            await playing.end(episode("e0p0", 0))
            at += 1
        assert at > 10


@pytest.mark.asyncio
async def test_a_restore_cancelled_at_every_await_begins_again_and_ends_the_same(
    tmp_path: Path,
) -> None:
    before = await prepared(tmp_path, FarPlane())
    assert (await before.snapshotter.save_rollout_snapshot()).saved
    on_disk = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    undisturbed = World(tmp_path)
    await undisturbed.restore()
    at, cancelled = 0, True
    while cancelled:
        plane = FarPlane()
        world = World(tmp_path, plane=plane)
        fresh = world.state
        cancelled = await is_cancelled_at(at, world.restore())
        assert await is_free(world.barrier)
        assert plane.pins_that_hold() == 0
        if cancelled:
            assert world.state is fresh, "the state is put in place last"
            assert await world.restore() is not None
        assert world.state == undisturbed.state
        assert_same_rows(await world.rows(), await undisturbed.rows())
        at += 1
    assert at > 8
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == on_disk


Transfer = Callable[[World], Coroutine[object, None, object]]


def sealing(world: World) -> Coroutine[object, None, object]:
    event = seal("e0p2", 1)
    return world.buffer.seal(event, {key: row_of(key) for key in event.staged_keys})


def publishing(world: World) -> Coroutine[object, None, object]:
    rows = [row_of(f"e0p3/{index}") for index in range(2)]
    return world.buffer.publish("e0p3", rows, lengths=[5, 5], end_weight_version=0)


def clearing(world: World) -> Coroutine[object, None, object]:
    return world.buffer.clear_retired()


@pytest.mark.asyncio
@pytest.mark.parametrize("transfer", [sealing, publishing, clearing])
async def test_a_transfer_cancelled_at_every_await_is_whole_or_can_be_done_again(
    tmp_path: Path, transfer: Transfer
) -> None:
    ends = []
    at, cancelled = 0, True
    while cancelled:
        plane = FarPlane()
        world = await prepared(tmp_path / str(at), plane)
        await world.do(dispatch("e0p2", 1))
        await world.admit(3)
        for sibling in range(2):
            await world.seal("e0p3", sibling)
        cancelled = await is_cancelled_at(at, transfer(world))
        assert await is_free(world.barrier)
        statuses = {group.status for group in world.state.ledger.groups.values()}
        assert PromptGroupStatus.FINALIZING not in statuses
        kept = capture(world.state, CheckpointKind.ROLLOUT_SNAPSHOT).unwrap()
        held = plane.pin(PARTITION).revisions((*kept.replay_rows, *kept.staging_rows))
        assert saving_problems(take_inventory(kept.state, held)) == ()
        if cancelled:
            await transfer(world)
        ends.append((world.state.ledger, set(world.state.replay), world.state.rows_to_clear))
        at += 1
    assert at > 2
    assert all(end == ends[0] for end in ends)
