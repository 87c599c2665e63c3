"""The process behind `guessing.GuessingGame`: number guessing over several turns.

An episode has a secret between 0 and 99 and a number of turns; each guess is answered with
`higher`, `lower` or `correct`. The process keeps every running episode's turns, and nobody else
does: that is what makes a turn-level snapshot necessary.

It speaks JSON lines on standard input and output, one request and one reply a line, matched by
`id`. Rule kept here: while paused, a request that would change an episode waits, so that the files
of a commit are one moment of all episodes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

PART_NAME = "episodes.json"


class Episode(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One running game."""

    secret: int
    turns: int
    """Guesses allowed."""
    guesses: list[int] = msgspec.field(default_factory=list)


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a commit writes: all episodes, by name."""

    episodes: dict[str, Episode]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line from the client. Which fields matter depends on `do`."""

    id: int
    do: str
    episode: str = ""
    secret: int = 0
    turns: int = 0
    guess: int = 0
    path: str = ""
    names: dict[str, str] = msgspec.field(default_factory=dict)


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line to the client. `error` is empty when the request was carried out."""

    id: int
    error: str = ""
    answer: str = ""
    turn: int = 0
    """Guesses made so far, this one included."""
    done: bool = False
    episodes: list[str] = msgspec.field(default_factory=list)


class Refused(Exception):
    """A request that makes no sense now; the message goes to the client."""


class Server:
    """All games of one process."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        self._paused = False
        self._waiting: list[Request] = []

    def handle(self, request: Request) -> list[Reply]:
        """The replies that are due now: none while the request waits for the end of a pause."""
        if self._paused and request.do in ("start", "guess", "end"):
            self._waiting.append(request)
            return []
        replies = [self._reply(request)]
        if not self._paused:
            waiting, self._waiting = self._waiting, []
            replies += [self._reply(each) for each in waiting]
        return replies

    def _reply(self, request: Request) -> Reply:
        try:
            return self._carry_out(request)
        except (Refused, OSError, msgspec.MsgspecError) as error:
            return Reply(id=request.id, error=f"{request.do}: {error}")

    def _carry_out(self, request: Request) -> Reply:
        match request.do:
            case "start":
                return self._start(request)
            case "guess":
                return self._guess(request)
            case "end":
                self._episodes.pop(request.episode, None)
            case "pause":
                self._paused = True
            case "commit":
                self._commit(Path(request.path))
                return Reply(id=request.id, episodes=sorted(self._episodes))
            case "resume":
                self._paused = False
            case "restore":
                return Reply(id=request.id, episodes=self._restore(request))
            case unknown:
                raise Refused(f"unknown request {unknown}")
        return Reply(id=request.id)

    def _start(self, request: Request) -> Reply:
        if request.episode in self._episodes:
            raise Refused(f"episode {request.episode} is running")
        self._episodes[request.episode] = Episode(secret=request.secret, turns=request.turns)
        return Reply(id=request.id)

    def _guess(self, request: Request) -> Reply:
        episode = self._episodes.get(request.episode)
        if episode is None:
            raise Refused(f"no episode {request.episode}")
        episode.guesses.append(request.guess)
        answer = (
            "correct"
            if request.guess == episode.secret
            else "higher"
            if request.guess < episode.secret
            else "lower"
        )
        turn = len(episode.guesses)
        done = answer == "correct" or turn >= episode.turns
        if done:
            del self._episodes[request.episode]
        return Reply(id=request.id, answer=answer, turn=turn, done=done)

    def _commit(self, directory: Path) -> None:
        if not self._paused:
            raise Refused("commit needs a pause")
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / PART_NAME).open("wb") as file:
            file.write(msgspec.json.encode(Part(episodes=self._episodes), order="deterministic"))
            file.flush()
            os.fsync(file.fileno())

    def _restore(self, request: Request) -> list[str]:
        part = msgspec.json.decode((Path(request.path) / PART_NAME).read_bytes(), type=Part)
        taken = {
            name: part.episodes[old] for old, name in request.names.items() if old in part.episodes
        }
        self._episodes = taken
        return sorted(taken)


def serve() -> None:
    """Answer requests until standard input ends."""
    server = Server()
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        for reply in server.handle(request):
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
