"""Snapshots beside an environment that keeps turns: pause, commit, cut, publish, resume, abort."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from rollsync.pure.rollout.checkpointing import RolloutTraceKind as Kind
from rollsync.pure.rollout.episodes import EnvironmentEpisode
from rollsync.shell.rollout.environments import NoEnvironmentCheckpoint
from rollsync.shell.rollout.environments.guessing import EnvironmentCallError, GuessingGame
from rollsync.shell.rollout.restore import RolloutRestoreError
from tests.pure.rollout.events_kit import dispatch, reserve
from tests.shell.rollout.test_snapshots import Slow
from tests.shell.rollout.world import World


def episode(group: str, sibling: int, attempt: int = 0) -> EnvironmentEpisode:
    return EnvironmentEpisode(group_id=group, sibling_index=sibling, attempt_index=attempt)


@asynccontextmanager
async def game() -> AsyncIterator[GuessingGame]:
    playing = await GuessingGame.start()
    try:
        yield playing
    finally:
        await playing.close()


async def play(
    world: World, playing: GuessingGame, group: str, sibling: int, *guesses: int
) -> None:
    """Dispatch an attempt and play some turns of it: the secret is 42, five guesses are allowed."""
    await world.do(dispatch(group, sibling))
    await playing.begin(episode(group, sibling), secret=42, turns=5)
    for guess in guesses:
        await playing.guess(episode(group, sibling), guess)


@pytest.mark.asyncio
async def test_unfinished_episodes_go_on_at_their_turn_after_a_resume(tmp_path: Path) -> None:
    async with game() as playing:
        world = World(tmp_path, environment=playing)
        await world.admit(0, 1)
        await world.ready(2)
        await world.do(reserve(3))
        await play(world, playing, "e0p0", 0, 10, 20, 30)
        await play(world, playing, "e0p0", 1, 50)
        await world.seal("e0p1", 0)
        assert (await world.snapshotter.save_rollout_snapshot()).saved
        kinds = [event.kind for event in world.trace.trace.events]
        await playing.guess(episode("e0p0", 0), 40)
    assert [kind for kind in kinds if kind is not Kind.SAVE_STARTED] == [
        Kind.ENVIRONMENT_PAUSED,
        Kind.CUT_TAKEN,
        Kind.CUT_LEFT,
        Kind.PUBLISHED,
        Kind.ENVIRONMENT_RESUMED,
        Kind.SAVE_ENDED,
    ]
    async with game() as resumed_game:
        after = World(tmp_path, environment=resumed_game)
        restored = await after.restore()
        assert restored is not None
        assert restored.continued == {episode("e0p0", 0, 1), episode("e0p0", 1, 1)}
        dispatched = {(each.group_id, each.sibling_index) for each in restored.plan.dispatches}
        assert dispatched == {("e0p0", 0), ("e0p0", 1), ("e0p1", 1)}
        turn = await resumed_game.guess(episode("e0p0", 0, 1), 42)
        assert (turn.turn, turn.answer, turn.done) == (4, "correct", True)
        assert (await resumed_game.guess(episode("e0p0", 1, 1), 42)).turn == 2


@pytest.mark.asyncio
async def test_without_the_environment_its_episodes_begin_again(tmp_path: Path) -> None:
    async with game() as playing:
        world = World(tmp_path, environment=playing)
        await world.admit(0)
        await play(world, playing, "e0p0", 0, 10)
        assert (await world.snapshotter.save_rollout_snapshot()).saved
    after = World(tmp_path, environment=NoEnvironmentCheckpoint())
    restored = await after.restore()
    assert restored is not None
    assert restored.continued == frozenset()
    assert [each.sibling_index for each in restored.plan.dispatches] == [0, 1]


@pytest.mark.asyncio
async def test_a_run_that_had_no_environment_to_save_may_resume_with_one(tmp_path: Path) -> None:
    world = World(tmp_path, environment=NoEnvironmentCheckpoint())
    await world.admit(0)
    await world.do(dispatch("e0p0", 0))
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    async with game() as playing:
        restored = await World(tmp_path, environment=playing).restore()
        assert restored is not None
        assert restored.continued == frozenset()
        assert [each.sibling_index for each in restored.plan.dispatches] == [0, 1]


class OtherRules(GuessingGame):
    @property
    def fingerprint(self) -> str | None:
        return "guessing-2"


@pytest.mark.asyncio
async def test_an_environment_with_other_rules_is_refused(tmp_path: Path) -> None:
    async with game() as playing:
        world = World(tmp_path, environment=playing)
        await world.admit(0)
        await play(world, playing, "e0p0", 0, 10)
        await world.snapshotter.save_rollout_snapshot()
    other = await OtherRules.start()
    after = World(tmp_path, environment=other)
    before = after.state
    with pytest.raises(RolloutRestoreError, match="environment_fingerprint is guessing-1"):
        await after.restore()
    assert after.state is before
    await other.close()


@pytest.mark.asyncio
async def test_a_contradiction_aborts_the_save_and_the_game_goes_on(tmp_path: Path) -> None:
    async with game() as playing:
        world = World(tmp_path, environment=playing)
        await world.admit(0)
        await playing.begin(episode("e0p0", 0), secret=42, turns=5)
        result = await world.snapshotter.save_rollout_snapshot()
        assert (result.saved, result.reason) == (False, Reason.IO_ERROR)
        assert world.archive.bundles() == []
        await world.do(dispatch("e0p0", 0))
        assert (await playing.guess(episode("e0p0", 0), 1)).turn == 1
        assert (await world.snapshotter.save_rollout_snapshot()).saved


@pytest.mark.asyncio
async def test_a_failed_publication_aborts_and_the_game_goes_on(tmp_path: Path) -> None:
    async with game() as playing:
        world = World(tmp_path, environment=playing)
        await world.admit(0)
        await play(world, playing, "e0p0", 0, 10)
        world.archive.failing = {"publish": OSError(28, "no space left")}
        result = await world.snapshotter.save_rollout_snapshot()
        assert (result.saved, result.reason) == (False, Reason.IO_ERROR)
        assert not (tmp_path / "draft").exists(), "nothing of the aborted part stays"
        assert (await playing.guess(episode("e0p0", 0), 20)).turn == 2


@pytest.mark.asyncio
async def test_a_failed_resume_closes_admission_and_keeps_the_snapshot(tmp_path: Path) -> None:
    playing = await GuessingGame.start()
    world = World(tmp_path, environment=playing)
    await world.admit(0)
    await play(world, playing, "e0p0", 0, 10)
    world.archive.published = lambda: os.kill(playing.process_id, signal.SIGKILL)
    result = await world.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (True, Reason.INVARIANT_ERROR)
    assert len(world.manager.closed) == 1
    assert "did not resume" in world.manager.closed[0]
    await playing.close()
    async with game() as resumed_game:
        after = World(tmp_path, environment=resumed_game)
        restored = await after.restore()
        assert restored is not None
        assert restored.continued == {episode("e0p0", 0, 1)}


@pytest.mark.asyncio
async def test_a_dead_environment_fails_the_save_before_anything_is_written(
    tmp_path: Path,
) -> None:
    playing = await GuessingGame.start()
    world = World(tmp_path, environment=playing)
    await world.admit(0)
    os.kill(playing.process_id, signal.SIGKILL)
    await playing.close()
    result = await world.snapshotter.save_rollout_snapshot()
    assert (result.saved, result.reason) == (False, Reason.INVARIANT_ERROR)
    assert len(world.manager.closed) == 1
    assert world.archive.bundles() == []
    with pytest.raises(EnvironmentCallError, match="ended with code -9"):
        await playing.guess(episode("e0p0", 0), 1)


@pytest.mark.asyncio
async def test_a_turn_during_a_save_waits_for_its_end_and_is_not_in_it(tmp_path: Path) -> None:
    async with game() as playing:
        archive = Slow(tmp_path, "publish")
        world = World(tmp_path, environment=playing, archive=archive)
        await world.admit(0)
        await play(world, playing, "e0p0", 0, 10)
        saving = asyncio.create_task(world.snapshotter.save_rollout_snapshot())
        await archive.until_reached()
        turn = asyncio.create_task(playing.guess(episode("e0p0", 0), 20))
        await asyncio.wait({turn}, timeout=0.1)
        assert not turn.done(), "the environment is paused until the snapshot has its name"
        archive.may_go_on.set()
        assert (await saving).saved
        assert (await turn).turn == 2
    async with game() as resumed_game:
        after = World(tmp_path, environment=resumed_game)
        await after.restore()
        assert (await resumed_game.guess(episode("e0p0", 0, 1), 20)).turn == 2
