"""Sequences of file operations after each of which the disk is in order, whatever happens.

Rules kept here: data before names, inner names before outer ones, one rename that makes it count,
and the directory of that rename after it; what is removed first loses its name, durably.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from rollsync.pure.snapshot.manifest import SnapshotFile
from rollsync.pure.snapshot.places import draft_name, is_leftover, trash_name
from rollsync.shell.store.filesystem import EntryKind, FileStatus, FileSystem


def status_of(fs: FileSystem, path: Path) -> FileStatus | None:
    """What is there; None when nothing is."""
    try:
        return fs.status(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def names_in(fs: FileSystem, directory: Path) -> tuple[str, ...]:
    """The names in a directory, sorted; nothing when it is not there."""
    try:
        return tuple(sorted(fs.list_directory(directory)))
    except FileNotFoundError:
        return ()


def write_file(fs: FileSystem, path: Path, data: bytes) -> None:
    """A new file with this content, which is durable then; its name is not yet."""
    file = fs.create(path)
    try:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        file.sync()
    finally:
        file.close()


def read_file(fs: FileSystem, path: Path) -> bytes:
    """A file's content."""
    return b"".join(fs.read(path))


class DurableDirectories:
    """Directories whose names are known to be durable.

    That one exists says little: the process that made it may have been killed before it was
    durable, and then everything in it would be lost with its name.
    """

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._known: set[Path] = set()

    def make(self, path: Path) -> None:
        """Make the directory, and those above it, where missing; its name is durable then."""
        if path in self._known:
            return
        if status_of(self._fs, path) is None:
            self.make(path.parent)
            self._fs.make_directory(path)
        self._fs.sync_directory(path.parent)
        self._known.add(path)

    def forget(self, path: Path) -> None:
        """The directory, and all in it, is gone."""
        self._known = {known for known in self._known if not known.is_relative_to(path)}


def publish_file(fs: FileSystem, path: Path, data: bytes) -> None:
    """A durable file under a name that was free. Readers see all of it or nothing."""
    draft = path.parent / draft_name(path.name, names_in(fs, path.parent))
    write_file(fs, draft, data)
    fs.rename(draft, path)
    fs.sync_directory(path.parent)


def displace(fs: FileSystem, path: Path) -> Path:
    """Take a name away from what has it, durably; where that lies now, for `delete_tree`."""
    trash = path.parent / trash_name(path.name, names_in(fs, path.parent))
    fs.rename(path, trash)
    fs.sync_directory(path.parent)
    return trash


def delete_tree(fs: FileSystem, path: Path) -> None:
    """Delete what no reader looks at. What is gone already is no error."""
    status = status_of(fs, path)
    if status is None:
        return
    if status.kind is not EntryKind.DIRECTORY:
        fs.remove_file(path)
        return
    for name in names_in(fs, path):
        delete_tree(fs, path / name)
    fs.remove_directory(path)


def sweep(fs: FileSystem, directory: Path, *, but_not: Collection[Path] = ()) -> None:
    """Delete what interrupted writes and removals have left in a directory.

    Args:
        but_not: drafts that are being written.

    Raises:
        OSError: something stays; the rest is gone.
    """
    leftovers = [
        name
        for name in names_in(fs, directory)
        if is_leftover(name) and directory / name not in but_not
    ]
    if leftovers:
        # Of a process that was killed before its rename was durable, a bundle would come back
        # under its former name, and half deleted.
        fs.sync_directory(directory)
    delete_all(fs, [directory / name for name in leftovers])


def delete_all(fs: FileSystem, paths: Iterable[Path]) -> None:
    """Delete what no reader looks at, as much of it as can be.

    Raises:
        OSError: the first of those that cannot.
    """
    failures = []
    for path in paths:
        try:
            delete_tree(fs, path)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def sync_tree(fs: FileSystem, directory: Path) -> None:
    """Make the names in a directory durable, the innermost ones first."""
    for name, kind in sorted(fs.list_directory(directory).items()):
        if kind is EntryKind.DIRECTORY:
            sync_tree(fs, directory / name)
    fs.sync_directory(directory)


def files_below(
    fs: FileSystem, directory: Path, prefix: str = "", *, but_not: str | None = None
) -> Iterator[tuple[str, EntryKind]]:
    """Everything in a directory and those in it that is no directory, by relative name.

    Args:
        but_not: a name directly in the directory that is left out, with all in it.
    """
    for name, kind in sorted(fs.list_directory(directory).items()):
        if name == but_not:
            continue
        if kind is EntryKind.DIRECTORY:
            yield from files_below(fs, directory / name, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", kind


def measure(fs: FileSystem, path: Path, name: str) -> SnapshotFile:
    """A file's size and digest, as a manifest has them."""
    size, digest = 0, hashlib.sha256()
    for chunk in fs.read(path):
        size += len(chunk)
        digest.update(chunk)
    return SnapshotFile(name=name, size_bytes=size, digest=digest.hexdigest())


def digest_of(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()
