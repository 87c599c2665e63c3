"""Files as the commands that show them need them: their bytes, or an error that says what to do."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from returns.pipeline import is_successful

from rollsync.codecs import DecodeError, decode, decode_any, describe
from rollsync.codecs.envelope import HEADER_BYTES, MAGIC, read_header
from rollsync.codecs.rollout.chain import read_chain
from rollsync.codecs.rollout.state import ROLLOUT_STATE
from rollsync.pure.rollout.state import RolloutState
from rollsync.pure.snapshot.manifest import (
    MANIFEST_FILE,
    SNAPSHOTS_DIRECTORY,
    RolloutSnapshotManifest,
)
from rollsync.pure.snapshot.places import SEGMENTS_DIRECTORY
from rollsync.shell.errors import RollsyncError


class UnreadableFile(RollsyncError):
    """A path on the command line is no file that can be read."""


class UndecodableFile(RollsyncError):
    """A file does not hold what rollsync writes.

    Args:
        path: The file.
        error: What is wrong with its bytes.
    """

    def __init__(self, path: Path, error: DecodeError) -> None:
        super().__init__(
            f"{path}: {describe(error)}",
            remedy="`rollsync inspect` on its directory shows which files are whole",
        )
        self.error = error


def read_bytes(path: Path) -> bytes:
    """The content of the file.

    Raises:
        UnreadableFile: There is no such file, or it may not be read.
    """
    return _read(path, only_ours=False)


def read_if_ours(path: Path) -> bytes:
    """The content of a file that rollsync has written; of another one (gigabytes of weights, say)
    only the beginning, which is enough to tell.

    Raises:
        UnreadableFile: There is no such file, or it may not be read.
    """
    return _read(path, only_ours=True)


def _read(path: Path, *, only_ours: bool) -> bytes:
    try:
        with open_regular(path) as file:
            beginning = file.read(HEADER_BYTES)
            if only_ours and not is_ours(beginning):
                return beginning
            return beginning + file.read()
    except OSError as error:
        raise UnreadableFile(
            f"{path}: {error.strerror}", remedy="name a file that can be read"
        ) from error


def open_regular(path: Path) -> BufferedReader:
    """A regular file, opened for reading. Of a pipe or a device, a read might never return.

    Raises:
        OSError: there is none, or it may not be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    reason = os.strerror(number) if stat.S_ISDIR(mode) else "no regular file"
    raise OSError(number, reason, str(path))


def is_ours(beginning: bytes) -> bool:
    """Whether a file that begins so is rollsync's, or was before it was cut off."""
    return MAGIC.startswith(beginning[: len(MAGIC)])


def read_value(path: Path) -> object:
    """The value in a file, of whatever kind it is.

    Raises:
        UnreadableFile: There is no such file, or it may not be read.
        UndecodableFile: Its bytes are not a whole value of a known kind.
    """
    result = decode_any(read_if_ours(path))
    if not is_successful(result):
        raise UndecodableFile(path, result.failure())
    return result.unwrap()


def read_state(directory: Path) -> RolloutState:
    """The rollout state of the bundle in `directory`: of a snapshot, or of a trainer checkpoint.

    The segments that it shares with others are looked for in the run directory that it lies in.

    Raises:
        UnreadableFile: There is none, or a file may not be read.
        UndecodableFile: Its bytes are not a whole state.
    """
    paths = _state_links(directory)
    read = read_chain(map(read_bytes, paths))
    if not is_successful(read):
        broken = read.failure()
        raise UndecodableFile(paths[broken.index], broken.error)
    return read.unwrap().state


def _state_links(directory: Path) -> list[Path]:
    """Files of the state, its base first."""
    path = directory / MANIFEST_FILE
    if path.is_file():
        decoded = decode(read_bytes(path), RolloutSnapshotManifest)
        if not is_successful(decoded):
            raise UndecodableFile(path, decoded.failure())
        names = decoded.unwrap().facts.state_segments
        if names:
            return _shared_links(directory, names)
    for path in sorted(directory.iterdir()):
        if path.is_file():
            header = read_header(_read(path, only_ours=True)[:HEADER_BYTES])
            if is_successful(header) and header.unwrap().kind == ROLLOUT_STATE.name:
                return [path]
    raise UnreadableFile(
        f"{directory}: no rollout state in this directory",
        remedy="name a snapshot, a trainer checkpoint, or a file",
    )


def _shared_links(bundle: Path, names: tuple[str, ...]) -> list[Path]:
    shared = _segments_of(bundle)
    for name in names:
        if not os.path.lexists(shared / name):
            raise UnreadableFile(
                f"{bundle}: its rollout state needs the segment {shared / name}, which is missing",
                remedy="a bundle is a part of its run directory: copy that as a whole, or the "
                f"run's {SEGMENTS_DIRECTORY}/ to {shared}",
            )
    return [shared / name for name in names]


def _segments_of(bundle: Path) -> Path:
    """The segments of the run directory that a bundle lies in."""
    above = bundle.absolute().parent
    run = above.parent.parent if above.name == SNAPSHOTS_DIRECTORY else above
    return run / SEGMENTS_DIRECTORY
