"""The run's journal: one JSON line for each thing that happened, flushed as it happens.

It is evidence, not state: a resume never reads it. The account of a finished run compares it with
the state on disk, two records made by different code.

Rule kept here: a line is written after what it reports has happened, and stays as it was written;
only half a line, which a killed process leaves, is taken back by the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from rollsync.shell.errors import RollsyncError
from rollsync.shell.files import open_regular


class Resumed(Struct, frozen=True, kw_only=True, tag="resumed"):
    """A process began: fresh, or from what a bundle held."""

    train_steps: int
    source: str | None
    """Path of the bundle relative to the run directory; None for a fresh run."""
    plan: tuple[str, ...] = ()
    """What the resume does with each group in flight, one line each."""
    refused: tuple[str, ...] = ()
    """Newer bundles that could not be taken, with the reason."""


class StepClaimed(Struct, frozen=True, kw_only=True, tag="step_claimed"):
    """A training step has claimed its groups."""

    step: int
    prompt_ids: tuple[str, ...]


class StepTrained(Struct, frozen=True, kw_only=True, tag="step_trained"):
    """An optimizer step is committed."""

    step: int
    prompt_ids: tuple[str, ...]
    mean_reward: float | None
    """None for a step that had nothing to train."""
    loss: float | None
    weight_versions: tuple[int, ...]
    """Start weight version of each group: with `step` it gives the staleness."""


class WeightsSynced(Struct, frozen=True, kw_only=True, tag="weights_synced"):
    """Every engine serves this version."""

    weight_version: int
    bytes: int
    seconds: float


class Saved(Struct, frozen=True, kw_only=True, tag="saved"):
    """A save was attempted."""

    what: str
    """`trainer_checkpoint` or `rollout_snapshot`."""
    saved: bool
    reason: str
    train_steps: int
    pause_ms: float
    """How long the exclusive cut held back every change."""


class PromptDropped(Struct, frozen=True, kw_only=True, tag="prompt_dropped"):
    """A prompt will not be trained."""

    prompt_id: str
    reason: str


class Finished(Struct, frozen=True, kw_only=True, tag="finished"):
    """The process ended by itself."""

    train_steps: int
    why: str


JournalEntry = (
    Resumed | StepClaimed | StepTrained | WeightsSynced | Saved | PromptDropped | Finished
)


class JournalLine(Struct, frozen=True, kw_only=True):
    """One line of the file."""

    at_s: float
    """Seconds since the epoch."""
    entry: JournalEntry


JournalListener = Callable[[JournalEntry], None]

_decoder = msgspec.json.Decoder(JournalLine)

_LINE_END = b"\n"
_TAIL_BYTES = 65536
"""How much is read at a time to find the last whole line."""


class JournalDamaged(RollsyncError):
    """A journal has a line that no journal has."""


class Journal:
    """Appends to the journal file and tells whoever listens.

    Args:
        path: the file; made if missing, appended to if not.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("a+b")
        _remove_half_line(self._file)
        self._listeners: list[JournalListener] = []

    def listen(self, listener: JournalListener) -> None:
        """Have `listener` told of every later entry."""
        self._listeners.append(listener)

    def write(self, entry: JournalEntry) -> None:
        """Append one line."""
        line = JournalLine(at_s=time.time(), entry=entry)
        self._file.write(msgspec.json.encode(line) + _LINE_END)
        self._file.flush()
        for listener in self._listeners:
            listener(entry)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """The entries of a journal, oldest first; none if there is no such file.

    A last line without its end is left out: it is being written, or its writer was killed.

    Raises:
        JournalDamaged: a whole line says nothing that a journal says, or it is no file to read.
    """
    if not os.path.lexists(path):
        return
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(_LINE_END):
                yield _entry(path, number, line)


def _opened(path: Path) -> IO[bytes]:
    try:
        return open_regular(path)
    except OSError as error:
        raise JournalDamaged(
            f"{path} cannot be read: {error.strerror}",
            remedy="the run itself needs no journal; put back the file, or move this away",
        ) from error


def _entry(path: Path, number: int, line: bytes) -> JournalEntry:
    try:
        return _decoder.decode(line).entry
    except msgspec.MsgspecError as error:
        raise JournalDamaged(
            f"{path}, line {number}: {error}",
            remedy="the run itself needs no journal; to account for it, mend or remove the line",
        ) from error


def _remove_half_line(file: IO[bytes]) -> None:
    """Cut off what a killed process had begun to write, so that every line stays a whole one."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(_LINE_END)
        if newline >= 0:
            end = start + newline + len(_LINE_END)
            break
        end = start
    file.truncate(end)
    file.seek(0, os.SEEK_END)
