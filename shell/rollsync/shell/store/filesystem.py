"""The few operations on files that the store is made of, and the real ones.

The store touches a run directory only through a `FileSystem`, so that tests can crash, tear, fail
or reorder every single operation. Rules kept here:

1. An operation does one thing: creating does not make durable, renaming does not replace.
2. An error of the operating system comes out as the `OSError` that it is; nothing is tried again.
3. A file system that cannot keep the store's promises is refused before anything is written to it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

READ_BYTES: Final = 1 << 20
"""Most bytes that `read` yields at once."""


class EntryKind(Enum):
    """What a name stands for."""

    FILE = "file"
    DIRECTORY = "directory"
    OTHER = "other"
    """A link, a socket, ...: never the store's."""


class FileStatus(Struct, frozen=True, kw_only=True):
    """What is known of a file or directory without reading it. Links are not followed."""

    kind: EntryKind
    size_bytes: int
    modified_ns: int
    inode: int


def reason_of(error: OSError) -> str:
    """What went wrong, without the path, which stands beside it wherever this is shown."""
    return error.strerror or str(error)


class WritableFile(Protocol):
    """A file that was just created, or opened for more at its end."""

    def write(self, data: bytes | memoryview) -> int:
        """Append some of `data`; how many bytes. Fewer than given is no error."""
        ...

    def sync(self) -> None:
        """Make the content durable (not the name: that is its directory's)."""
        ...

    def close(self) -> None:
        """Give the file up. It may fail, and is closed all the same."""
        ...


class Lock(Protocol):
    """Held until it is released or the process ends."""

    def release(self) -> None:
        """Give it up."""
        ...


class FileSystem(Protocol):
    """Everything that the store does with files.

    Every method raises `OSError`; `FileNotFoundError` and `FileExistsError` mean what they say.
    """

    def create(self, path: Path) -> WritableFile:
        """A new empty file. It must not exist."""
        ...

    def append(self, path: Path) -> WritableFile:
        """The file, to write more at its end; a new empty one if there is none."""
        ...

    def read(self, path: Path) -> Iterator[bytes]:
        """The content of a file, in pieces of at most `READ_BYTES`. It is opened at once, that
        is, before the first piece is asked for."""
        ...

    def sync_file(self, path: Path) -> None:
        """Make the content of a file durable that somebody else wrote."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, atomically. `target` must not exist."""
        ...

    def make_directory(self, path: Path) -> None:
        """A new empty directory. It must not exist, its parent must."""
        ...

    def list_directory(self, path: Path) -> dict[str, EntryKind]:
        """The names in a directory, in no order that means anything."""
        ...

    def status(self, path: Path) -> FileStatus:
        """Of a file or directory."""
        ...

    def remove_file(self, path: Path) -> None:
        """Remove a file, link or whatever is no directory."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        ...

    def lock(self, path: Path) -> Lock:
        """Take the one lock of that name, creating its file if needed, without waiting.

        Raises:
            BlockingIOError: another process holds it.
        """
        ...

    def type_name(self, path: Path) -> str:
        """What kind of file system `path` (which exists) is on, as the mount table has it."""
        ...


class UnsuitableFileSystem(OSError):
    """A file system on which a save could not be made to survive a crash."""


# Object stores behind FUSE: a rename of a directory copies and deletes one object after another,
# and what fsync returns for says nothing about the object.
_WITHOUT_ATOMIC_RENAME: Final = frozenset(
    {
        "fuse.blobfuse",
        "fuse.blobfuse2",
        "fuse.gcsfuse",
        "fuse.geesefs",
        "fuse.goofys",
        "fuse.mountpoint-s3",
        "fuse.ossfs",
        "fuse.rclone",
        "fuse.s3fs",
    }
)
_UNSUPPORTED: Final = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}
)
PROBE_NAME: Final = "probe.writing"


def require_suitable(files: FileSystem, directory: Path) -> None:
    """Try out what the store relies on: fsync of files and directories, and a rename that is one
    step and refuses a name that exists.

    Args:
        directory: exists; the probe is made in it and removed again.

    Raises:
        UnsuitableFileSystem: it cannot, and what it is called.
        OSError: another error: the disk is full, the directory may not be written.
    """
    name = files.type_name(directory)
    if name in _WITHOUT_ATOMIC_RENAME:
        raise UnsuitableFileSystem(
            errno.EOPNOTSUPP,
            f"file system {name} renames a directory file by file, so that a crash leaves half a"
            " snapshot: keep the run directory on a local or POSIX network file system, and copy"
            " it from there",
            str(directory),
        )
    probe = directory / PROBE_NAME
    _remove_probe(files, probe)
    try:
        _exercise(files, probe)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        raise UnsuitableFileSystem(
            errno.EOPNOTSUPP,
            f"file system {name} cannot make files and names durable ({error.strerror}): keep the"
            " run directory on a local or POSIX network file system",
            str(directory),
        ) from error
    finally:
        _remove_probe(files, probe)


def _exercise(files: FileSystem, probe: Path) -> None:
    files.make_directory(probe)
    for name in ("a", "b"):
        files.make_directory(probe / name)
        file = files.create(probe / name / "file")
        try:
            file.write(b"probe")
            file.sync()
        finally:
            file.close()
        files.sync_directory(probe / name)
    files.rename(probe / "a", probe / "c")
    files.sync_directory(probe)
    try:
        files.rename(probe / "b", probe / "c")
    except FileExistsError:
        return
    raise OSError(errno.EOPNOTSUPP, "a rename replaces what is there")


def _remove_probe(files: FileSystem, probe: Path) -> None:
    try:
        names = files.list_directory(probe)
    except FileNotFoundError:
        return
    for name in names:
        for inner in files.list_directory(probe / name):
            files.remove_file(probe / name / inner)
        files.remove_directory(probe / name)
    files.remove_directory(probe)


class _RealFile:
    """An open file descriptor. Python tries a call again that a signal interrupted."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> int:
        return os.write(self._descriptor, data)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _RealLock:
    """A locked file, unlocked by closing it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class RealFileSystem:
    """The machine's own."""

    def create(self, path: Path) -> WritableFile:
        return _RealFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def append(self, path: Path) -> WritableFile:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        return _RealFile(os.open(path, flags, 0o644))

    def read(self, path: Path) -> Iterator[bytes]:
        # Not a generator function: a missing file is to be noticed here.
        return _pieces(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))

    def sync_file(self, path: Path) -> None:
        _sync(path, os.O_RDONLY | os.O_NOFOLLOW)

    def sync_directory(self, path: Path) -> None:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, source: Path, target: Path) -> None:
        if _RENAME_EXCLUSIVELY is not None:
            try:
                _RENAME_EXCLUSIVELY(source, target)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            else:
                return
        # Some network file systems have no exclusive rename. The store has one writer at a time,
        # so nothing comes between the look and the rename.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)

    def make_directory(self, path: Path) -> None:
        os.mkdir(path, 0o755)

    def list_directory(self, path: Path) -> dict[str, EntryKind]:
        with os.scandir(path) as entries:
            return {entry.name: _entry_kind(entry) for entry in entries}

    def status(self, path: Path) -> FileStatus:
        found = os.lstat(path)
        return FileStatus(
            kind=_kind_of(found.st_mode),
            size_bytes=found.st_size,
            modified_ns=found.st_mtime_ns,
            inode=found.st_ino,
        )

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_directory(self, path: Path) -> None:
        os.rmdir(path)

    def lock(self, path: Path) -> Lock:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A lock of the process and not of the descriptor: a run that is restored in the process
            # that saved it is no stranger to itself.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            os.close(descriptor)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from error
        except OSError as error:
            # Some network file systems are mounted without locks. Then nothing guards against two
            # runs in one directory, and a single run is as safe as ever.
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                os.close(descriptor)
                raise
        return _RealLock(descriptor)

    def type_name(self, path: Path) -> str:
        try:
            table = Path("/proc/self/mounts").read_text("utf-8", errors="surrogateescape")
        except OSError:
            return "unknown"
        return _mounted_type(table, os.path.realpath(path))


def _pieces(descriptor: int) -> Iterator[bytes]:
    try:
        while piece := os.read(descriptor, READ_BYTES):
            yield piece
    finally:
        os.close(descriptor)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry_kind(entry: os.DirEntry[str]) -> EntryKind:
    if entry.is_dir(follow_symlinks=False):
        return EntryKind.DIRECTORY
    return EntryKind.FILE if entry.is_file(follow_symlinks=False) else EntryKind.OTHER


def _kind_of(mode: int) -> EntryKind:
    if stat.S_ISDIR(mode):
        return EntryKind.DIRECTORY
    return EntryKind.FILE if stat.S_ISREG(mode) else EntryKind.OTHER


def _mounted_type(table: str, path: str) -> str:
    """The type of the file system that `path` is on: that of the longest mount point over it, and
    of equal ones the last, which hides the others."""
    best, name = -1, "unknown"
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # The table writes blank, tab, line end and backslash as octal numbers.
        point = fields[1].encode("utf-8", "surrogateescape").decode("unicode_escape")
        under = path == point or path.startswith(point.rstrip("/") + "/")
        if under and len(point) >= best:
            best, name = len(point), fields[2]
    return name


def _exclusive_rename() -> Callable[[Path, Path], None] | None:
    """Linux's `renameat2` with RENAME_NOREPLACE, where the C library has it: Python's own rename
    replaces an empty directory and any file."""
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "renameat2", None)
    if function is None:
        return None
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    function.restype = ctypes.c_int
    at_working_directory, no_replace = -100, 1

    def rename(source: Path, target: Path) -> None:
        failed = function(
            at_working_directory,
            os.fsencode(source),
            at_working_directory,
            os.fsencode(target),
            no_replace,
        )
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(source), None, str(target))

    return rename


_RENAME_EXCLUSIVELY: Final = _exclusive_rename()
