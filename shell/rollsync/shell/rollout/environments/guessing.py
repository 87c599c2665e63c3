"""A real multi-turn environment: number guessing, played in a process of its own.

Small enough for tests and the demo, and a true backend: the turns of an episode are in the other
process only. Rule kept here: a process that died fails every call that waits for it, with its exit
code, and never leaves one waiting.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rollsync.pure.rollout.episodes import EnvironmentEpisode, contradictions
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.environments import guessing_server
from rollsync.shell.rollout.environments.guessing_server import Reply, Request
from rollsync.shell.rollout.environments.protocol import (
    EnvironmentRestoreError,
    EnvironmentResumeError,
    EnvironmentSaveError,
    EnvironmentSnapshot,
)
from rollsync.shell.rollout.settle import settled


class EnvironmentCallError(RollsyncError):
    """The environment's process refused a request, or is gone."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment answers to one guess."""

    answer: str
    """`higher`, `lower` or `correct`."""
    turn: int
    """Guesses made so far, this one included."""
    done: bool


class GuessingGame:
    """Client and checkpoint of the guessing process. Make it with `GuessingGame.start`."""

    def __init__(self, process: asyncio.subprocess.Process, *, reply_timeout_s: float) -> None:
        self._process = process
        self._reply_timeout_s = reply_timeout_s
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, *, reply_timeout_s: float = 30.0) -> GuessingGame:
        """Start the process.

        Args:
            reply_timeout_s: how long pause, commit, resume and restore may take.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            # By its path: as a module it would import its packages, and with them torch.
            guessing_server.__file__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process, reply_timeout_s=reply_timeout_s)

    @property
    def process_id(self) -> int:
        """Of the environment's process."""
        return self._process.pid

    async def close(self) -> None:
        """End the process and wait for it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        await self._reader

    # Playing.

    async def begin(self, episode: EnvironmentEpisode, *, secret: int, turns: int) -> None:
        """Start a game with `turns` guesses for `secret` (0 to 99)."""
        await self._call("start", episode=episode_name(episode), secret=secret, turns=turns)

    async def guess(self, episode: EnvironmentEpisode, number: int) -> Turn:
        """Make one guess. Waits while the environment is paused."""
        reply = await self._call("guess", episode=episode_name(episode), guess=number)
        return Turn(answer=reply.answer, turn=reply.turn, done=reply.done)

    async def end(self, episode: EnvironmentEpisode) -> None:
        """Forget a game, if it runs."""
        await self._call("end", episode=episode_name(episode))

    # Saving and restoring: an `EnvironmentCheckpoint`.

    @property
    def fingerprint(self) -> str | None:
        """Name and version of the rules."""
        return "guessing-1"

    @asynccontextmanager
    async def snapshot(self, path: Path) -> AsyncIterator[EnvironmentSnapshot | None]:
        """See `EnvironmentCheckpoint.snapshot`."""
        try:
            await self._command("pause")
            committed = await self._command("commit", path=str(path))
        except EnvironmentCallError as error:
            await self._resume()
            raise EnvironmentSaveError(f"the environment was not saved: {error}") from error
        except asyncio.CancelledError:
            await self._resume()
            raise
        try:
            yield _CommittedPart(tuple(episode_named(name) for name in committed.episodes))
        finally:
            await self._resume()

    async def restore(
        self, path: Path, continued: Mapping[EnvironmentEpisode, EnvironmentEpisode]
    ) -> tuple[EnvironmentEpisode, ...]:
        """See `EnvironmentCheckpoint.restore`."""
        names = {episode_name(old): episode_name(new) for old, new in continued.items()}
        try:
            reply = await self._command("restore", path=str(path), names=names)
        except EnvironmentCallError as error:
            raise EnvironmentRestoreError(
                f"{path}: the environment does not take its part back: {error}",
                remedy="resume from an older snapshot, or start the unfinished groups again",
            ) from error
        return tuple(episode_named(name) for name in reply.episodes)

    async def _resume(self) -> None:
        try:
            await settled(self._command("resume"))
        except EnvironmentCallError as error:
            raise EnvironmentResumeError(
                f"the environment did not resume: {error}",
                remedy="restart the run; it resumes from its newest snapshot",
            ) from error

    # The wire.

    async def _command(
        self, do: str, *, path: str = "", names: dict[str, str] | None = None
    ) -> Reply:
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                return await self._call(do, path=path, names=names)
        except TimeoutError as error:
            raise EnvironmentCallError(
                f"no reply to {do} within {self._reply_timeout_s:g} s"
            ) from error

    async def _call(
        self,
        do: str,
        *,
        episode: str = "",
        secret: int = 0,
        turns: int = 0,
        guess: int = 0,
        path: str = "",
        names: dict[str, str] | None = None,
    ) -> Reply:
        stdin = self._process.stdin
        if stdin is None or self._reader.done():
            raise EnvironmentCallError(self._gone())
        request = Request(
            id=self._next_id,
            do=do,
            episode=episode,
            secret=secret,
            turns=turns,
            guess=guess,
            path=path,
            names=names or {},
        )
        self._next_id += 1
        replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = replied
        try:
            stdin.write(msgspec.json.encode(request) + b"\n")
            await stdin.drain()
            reply = await replied
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EnvironmentCallError(self._gone()) from error
        finally:
            self._waiting.pop(request.id, None)
        if reply.error:
            raise EnvironmentCallError(reply.error)
        return reply

    async def _read(self) -> None:
        if self._process.stdout is None:
            return
        async for line in self._process.stdout:
            reply = msgspec.json.decode(line, type=Reply)
            waiting = self._waiting.pop(reply.id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(reply)
        await self._process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvironmentCallError(self._gone()))

    def _gone(self) -> str:
        return f"the environment's process has ended with code {self._process.returncode}"


class _CommittedPart:
    """The part that the paused process wrote."""

    def __init__(self, episodes: tuple[EnvironmentEpisode, ...]) -> None:
        self._episodes = episodes

    @property
    def episodes(self) -> tuple[EnvironmentEpisode, ...]:
        return self._episodes

    async def check_against_cut(self, state: RolloutState) -> None:
        found = contradictions(state, self._episodes)
        if found:
            first = found[0]
            raise EnvironmentSaveError(
                f"{len(found)} of {len(self._episodes)} episodes contradict the ledger, "
                f"first {episode_name(first.episode)}: {first.why}"
            )


def episode_name(episode: EnvironmentEpisode) -> str:
    """The episode's name on the wire. Group ids have no slash."""
    return f"{episode.group_id}/{episode.sibling_index}/{episode.attempt_index}"


def episode_named(name: str) -> EnvironmentEpisode:
    """The episode of a name that `episode_name` made."""
    group_id, sibling, attempt = name.split("/")
    return EnvironmentEpisode(
        group_id=group_id, sibling_index=int(sibling), attempt_index=int(attempt)
    )
