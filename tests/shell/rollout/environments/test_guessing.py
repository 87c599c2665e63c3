"""The guessing game in its own process: turns, pause, commit, restore, abort, a dead process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollsync.pure.rollout.episodes import EnvironmentEpisode
from rollsync.shell.rollout.environments.guessing import EnvironmentCallError, GuessingGame
from rollsync.shell.rollout.environments.protocol import (
    EnvironmentRestoreError,
    EnvironmentResumeError,
    EnvironmentSaveError,
)
from tests.pure.rollout.events_kit import after, fresh, reserve


def episode(group: str = "e0p0", sibling: int = 0, attempt: int = 0) -> EnvironmentEpisode:
    return EnvironmentEpisode(group_id=group, sibling_index=sibling, attempt_index=attempt)


@asynccontextmanager
async def game(reply_timeout_s: float = 30.0) -> AsyncIterator[GuessingGame]:
    playing = await GuessingGame.start(reply_timeout_s=reply_timeout_s)
    try:
        yield playing
    finally:
        await playing.close()


@pytest.mark.asyncio
async def test_a_game_over_several_turns() -> None:
    async with game() as playing:
        await playing.begin(episode(), secret=42, turns=3)
        first = await playing.guess(episode(), 10)
        second = await playing.guess(episode(), 60)
        third = await playing.guess(episode(), 42)
        with pytest.raises(EnvironmentCallError, match="no episode"):
            await playing.guess(episode(), 1)
    assert [(turn.answer, turn.turn, turn.done) for turn in (first, second, third)] == [
        ("higher", 1, False),
        ("lower", 2, False),
        ("correct", 3, True),
    ]


@pytest.mark.asyncio
async def test_a_committed_game_goes_on_in_another_process_under_its_new_name(
    tmp_path: Path,
) -> None:
    async with game() as playing:
        await playing.begin(episode(), secret=42, turns=3)
        await playing.begin(episode(sibling=1), secret=7, turns=3)
        await playing.guess(episode(), 10)
        async with playing.snapshot(tmp_path) as part:
            assert part is not None
            assert part.episodes == (episode(), episode(sibling=1))
            later = asyncio.create_task(playing.guess(episode(), 20))
            done, _ = await asyncio.wait({later}, timeout=0.05)
            assert not done, "a turn waits while the environment is paused"
        assert (await later).turn == 2
    async with game() as resumed:
        went_on = await resumed.restore(tmp_path, {episode(): episode(attempt=1)})
        assert went_on == (episode(attempt=1),)
        turn = await resumed.guess(episode(attempt=1), 42)
        assert (turn.turn, turn.answer) == (2, "correct"), "the turn after the cut is not in it"
        with pytest.raises(EnvironmentCallError, match="no episode"):
            await resumed.guess(episode(sibling=1), 7)


@pytest.mark.asyncio
async def test_an_aborted_snapshot_resumes_the_game(tmp_path: Path) -> None:
    async with game() as playing:
        await playing.begin(episode(), secret=42, turns=3)
        with pytest.raises(ZeroDivisionError):
            async with playing.snapshot(tmp_path):
                raise ZeroDivisionError
        assert (await playing.guess(episode(), 10)).turn == 1


@pytest.mark.asyncio
async def test_a_snapshot_cancelled_inside_resumes_the_game(tmp_path: Path) -> None:
    async with game() as playing:
        await playing.begin(episode(), secret=42, turns=3)
        inside = asyncio.Event()

        async def save_for_ever() -> None:
            async with playing.snapshot(tmp_path):
                inside.set()
                await asyncio.Event().wait()

        saving = asyncio.create_task(save_for_ever())
        await inside.wait()
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        assert (await playing.guess(episode(), 10)).turn == 1


@pytest.mark.asyncio
async def test_a_part_that_cannot_be_written_is_an_error_and_the_game_goes_on(
    tmp_path: Path,
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a directory")
    async with game() as playing:
        await playing.begin(episode(), secret=42, turns=3)
        with pytest.raises(EnvironmentSaveError, match="commit"):
            async with playing.snapshot(occupied):
                raise AssertionError("the block ran without a part")
        assert (await playing.guess(episode(), 10)).turn == 1


@pytest.mark.asyncio
async def test_a_process_that_died_fails_the_resume_and_every_waiting_turn(tmp_path: Path) -> None:
    playing = await GuessingGame.start()
    await playing.begin(episode(), secret=42, turns=3)
    waiting: list[asyncio.Task[object]] = []

    async def save_and_kill() -> None:
        async with playing.snapshot(tmp_path):
            waiting.append(asyncio.create_task(playing.guess(episode(), 10)))
            await asyncio.sleep(0)
            os.kill(playing.process_id, signal.SIGKILL)

    with pytest.raises(EnvironmentResumeError, match="did not resume"):
        await save_and_kill()
    with pytest.raises(EnvironmentCallError, match="ended with code -9"):
        await waiting[0]
    await playing.close()


@pytest.mark.asyncio
async def test_a_process_that_hangs_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    playing = await GuessingGame.start(reply_timeout_s=0.2)
    os.kill(playing.process_id, signal.SIGSTOP)
    with pytest.raises(EnvironmentResumeError, match=r"no reply to resume within 0\.2 s"):
        async with playing.snapshot(tmp_path):
            raise AssertionError("the block ran without a pause")
    os.kill(playing.process_id, signal.SIGCONT)
    await playing.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("content", [b"", b"{", b'{"episodes": {"x": {"secret": "?"}}}'])
async def test_a_damaged_part_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "episodes.json").write_bytes(content)
    async with game() as playing:
        with pytest.raises(EnvironmentRestoreError, match="older snapshot"):
            await playing.restore(tmp_path, {episode(): episode()})


@pytest.mark.asyncio
async def test_an_episode_that_the_ledger_never_dispatched_contradicts_it(tmp_path: Path) -> None:
    reserved = after(fresh(), reserve(0))
    async with game() as playing:
        await playing.begin(episode(), secret=1, turns=2)
        await playing.begin(episode(group="gone"), secret=1, turns=2)
        async with playing.snapshot(tmp_path) as part:
            assert part is not None
            with pytest.raises(EnvironmentSaveError, match=r"1 of 2 .* never dispatched"):
                await part.check_against_cut(reserved)
            await part.check_against_cut(fresh())
