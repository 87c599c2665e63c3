"""The run's journal: one JSON line for each thing that happened, written as it happens.

It is evidence, not state: a resume never reads it. The account of a finished run compares it with
the state on disk, two records made by different code. Rules kept here:

1. A line is written after what it reports has happened, and stays as it was written.
2. What a save holds is in the journal, durably, before the save has its name (`Journal.sync`): so
   the account closes after a power failure too. Lines after the newest save may then be lost, torn
   or garbage; a reader passes over them.
3. A journal that cannot be written (a full disk) is told of in the log, and stops neither the run
   nor its saves.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from rollsync.shell.errors import RollsyncError
from rollsync.shell.files import open_regular
from rollsync.shell.store.durable import DurableDirectories, status_of
from rollsync.shell.store.filesystem import FileSystem, RealFileSystem, WritableFile


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


class EngineChanged(Struct, frozen=True, kw_only=True, tag="engine_changed"):
    """A generation engine is good for something else than before."""

    engine: str
    was: str | None
    """Its phase before; None for one whose start has begun."""
    now: str
    why: str
    weight_version: int | None
    pid: int | None
    host: str | None


class SyncRetried(Struct, frozen=True, kw_only=True, tag="sync_retried"):
    """A sync failed because of an engine, and was tried again without it."""

    weight_version: int
    why: str


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
    Resumed
    | StepClaimed
    | StepTrained
    | WeightsSynced
    | EngineChanged
    | SyncRetried
    | Saved
    | PromptDropped
    | Finished
)


class JournalLine(Struct, frozen=True, kw_only=True):
    """One line of the file."""

    at_s: float
    """Seconds since the epoch."""
    entry: JournalEntry


JournalListener = Callable[[JournalEntry], None]

_decoder = msgspec.json.Decoder(JournalLine)

_LINE_END = b"\n"
_SAVES_AFTER_WHICH_LINES_ARE_DURABLE = 2
"""Of one process. Before the second was published, everything before the first's line was synced;
before the first, only what was written when it began."""
_logger = logging.getLogger(__name__)


class JournalDamaged(RollsyncError):
    """A journal has a line that no journal has."""


class Journal:
    """Appends to the journal file and tells whoever listens.

    Args:
        path: the file; made if missing, appended to if not.
        fs: where it is; default: the machine's own.
    """

    def __init__(self, path: Path, fs: FileSystem | None = None) -> None:
        self._path = path
        self._fs: FileSystem = RealFileSystem() if fs is None else fs
        self._listeners: list[JournalListener] = []
        DurableDirectories(self._fs).make(path.parent)
        before = status_of(self._fs, path)
        self._file: WritableFile = self._fs.append(path)
        # A killed process may have left half a line, which is to stay one by itself.
        self._begun = before is not None and before.size_bytes > 0

    def listen(self, listener: JournalListener) -> None:
        """Have `listener` told of every later entry."""
        self._listeners.append(listener)

    def write(self, entry: JournalEntry) -> None:
        """Append one line."""
        line = JournalLine(at_s=time.time(), entry=entry)
        data = msgspec.json.encode(line) + _LINE_END
        left = memoryview(_LINE_END + data if self._begun else data)
        try:
            while left:
                left = left[self._file.write(left) :]
            self._begun = False
        except OSError as error:
            self._begun = True
            _logger.warning("%s lacks a line: %s", self._path, error)
        for listener in self._listeners:
            listener(entry)

    def sync(self) -> None:
        """Make all lines durable, as far as the disk does."""
        try:
            self._file.sync()
        except OSError as error:
            _logger.warning("%s may lack lines after a power failure: %s", self._path, error)

    def close(self) -> None:
        """Make all lines durable and close the file."""
        self.sync()
        self._file.close()


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """The entries of a journal, oldest first. As `read_lines` otherwise."""
    return (line.entry for line in read_lines(path))


def read_evidence(path: Path) -> Iterator[JournalEntry]:
    """As `read_journal`, for who would take a file without one readable line for a quiet run.

    The first line is durable before the first save is, so only a power failure before that leaves
    such a file; else something has happened to it.

    Raises:
        JournalDamaged: as `read_lines` does, and when the file is not empty and has no such line.
    """
    has_any = False
    for entry in read_journal(path):
        has_any = True
        yield entry
    if not has_any and os.path.lexists(path) and (size_bytes := path.stat().st_size) > 0:
        raise JournalDamaged(
            f"{path}: no line can be read in its {size_bytes} bytes",
            remedy="the run itself needs no journal; put back the file, or move this away",
        )


def read_lines(path: Path) -> Iterator[JournalLine]:
    """The lines of a journal, oldest first; none if there is no such file.

    A last line without its end is left out: it is being written, or its writer was killed. So is
    what a power failure has made of lines after a save.

    Raises:
        JournalDamaged: a line that was durable says nothing that a journal says, or the path is no
            file to read.
    """
    if not os.path.lexists(path):
        return
    try:
        file = open_regular(path)
    except OSError as error:
        raise JournalDamaged(
            f"{path} cannot be read: {error.strerror}",
            remedy="the run itself needs no journal; put back the file, or move this away",
        ) from error
    with file:
        yield from decoded(file, source=str(path))


def entries_of(lines: Iterable[bytes], *, source: str) -> Iterator[JournalEntry]:
    """The entries of a journal's lines. As `decoded` otherwise."""
    return (line.entry for line in decoded(lines, source=source))


def decoded(lines: Iterable[bytes], *, source: str) -> Iterator[JournalLine]:
    """A journal's lines, given with their ends; `source` names it in errors. Raises as
    `read_lines` does."""
    unread: JournalDamaged | None = None
    saves_since = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(_LINE_END):
            return
        if line == _LINE_END:
            continue
        try:
            read = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            if unread is None:
                unread, saves_since = _damaged(source, number, error), 0
            continue
        entry = read.entry
        if isinstance(entry, Resumed):
            unread = None  # The process before ended there, perhaps with the power.
        elif isinstance(entry, Saved) and entry.saved:
            saves_since += 1
        if unread is not None and saves_since == _SAVES_AFTER_WHICH_LINES_ARE_DURABLE:
            raise unread
        yield read


def _damaged(source: str, number: int, error: msgspec.MsgspecError) -> JournalDamaged:
    return JournalDamaged(
        f"{source}, line {number}: {error}",
        remedy="the run itself needs no journal; to account for it, mend or remove the line",
    )
