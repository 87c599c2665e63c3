"""The real file system does one thing at a time, and an unsuitable one is refused by name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollsync.shell.store.filesystem import (
    READ_BYTES,
    EntryKind,
    RealFileSystem,
    UnsuitableFileSystem,
    WritableFile,
    _mounted_type,
    require_suitable,
)

FILES = RealFileSystem()


def write(path: Path, data: bytes) -> None:
    file = FILES.create(path)
    assert file.write(data) == len(data)
    file.sync()
    file.close()


def test_a_file_is_created_once_and_read_in_pieces(tmp_path: Path) -> None:
    data = os.urandom(READ_BYTES + 5)
    write(tmp_path / "a", data)
    pieces = list(FILES.read(tmp_path / "a"))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= READ_BYTES
    with pytest.raises(FileExistsError):
        FILES.create(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        FILES.read(tmp_path / "b")


@pytest.mark.parametrize("exclusively", [True, False])
def test_a_rename_never_replaces(
    tmp_path: Path, exclusively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exclusively:
        monkeypatch.setattr("rollsync.shell.store.filesystem._RENAME_EXCLUSIVELY", None)
    write(tmp_path / "a", b"a")
    write(tmp_path / "b", b"b")
    FILES.make_directory(tmp_path / "d")
    FILES.make_directory(tmp_path / "e")
    for source, target in (("a", "b"), ("d", "e"), ("a", "d"), ("d", "a")):
        with pytest.raises(FileExistsError):
            FILES.rename(tmp_path / source, tmp_path / target)
    FILES.rename(tmp_path / "d", tmp_path / "f")
    FILES.rename(tmp_path / "a", tmp_path / "f" / "a")
    assert sorted(FILES.list_directory(tmp_path)) == ["b", "e", "f"]
    assert (tmp_path / "f" / "a").read_bytes() == b"a"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_where_an_exclusive_rename_is_unknown_another_looks_first(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("rollsync.shell.store.filesystem._RENAME_EXCLUSIVELY", refuse)
    write(tmp_path / "a", b"a")
    write(tmp_path / "b", b"b")
    with pytest.raises(FileExistsError if number != errno.EIO else OSError):
        FILES.rename(tmp_path / "a", tmp_path / "b")
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            FILES.rename(tmp_path / "a", tmp_path / "c")
    else:
        FILES.rename(tmp_path / "a", tmp_path / "c")
        assert sorted(FILES.list_directory(tmp_path)) == ["b", "c"]


def test_a_status_is_that_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a", b"abc")
    found, expected = FILES.status(tmp_path / "a"), os.stat(tmp_path / "a")
    assert (found.kind, found.size_bytes) == (EntryKind.FILE, 3)
    assert (found.modified_ns, found.inode) == (expected.st_mtime_ns, expected.st_ino)
    assert FILES.status(tmp_path).kind is EntryKind.DIRECTORY


def test_only_a_directory_is_synced_as_one(tmp_path: Path) -> None:
    write(tmp_path / "a", b"")
    FILES.sync_directory(tmp_path)
    with pytest.raises(NotADirectoryError):
        FILES.sync_directory(tmp_path / "a")


def test_more_is_written_at_a_files_end(tmp_path: Path) -> None:
    for data in (b"a", b"bc"):
        file = FILES.append(tmp_path / "log")
        assert file.write(data) == len(data)
        file.close()
    assert (tmp_path / "log").read_bytes() == b"abc"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("number", "raised"),
    [
        (errno.EAGAIN, BlockingIOError),
        (errno.EACCES, BlockingIOError),
        (errno.EIO, OSError),
        (errno.ENOSYS, None),
        (errno.ENOLCK, None),
        (errno.EOPNOTSUPP, None),
    ],
)
def test_a_lock_that_is_refused_is_held_by_another_and_one_that_is_unknown_guards_nothing(
    tmp_path: Path,
    number: int,
    raised: type[OSError] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.lockf", refuse)
    before = descriptors()
    if raised is None:
        FILES.lock(tmp_path / "lock").release()
    else:
        with pytest.raises(raised) as caught:
            FILES.lock(tmp_path / "lock")
        assert type(caught.value) is raised
    assert descriptors() == before


def test_nothing_stays_open(tmp_path: Path) -> None:
    write(tmp_path / "a", b"abc")
    before = descriptors()
    assert list(FILES.read(tmp_path / "a")) == [b"abc"]
    half = FILES.read(tmp_path / "a")
    next(half)
    del half
    FILES.sync_file(tmp_path / "a")
    FILES.sync_directory(tmp_path)
    FILES.list_directory(tmp_path)
    FILES.lock(tmp_path / "lock").release()
    require_suitable(FILES, tmp_path)
    assert descriptors() == before


def test_links_are_neither_followed_nor_taken_for_files(tmp_path: Path) -> None:
    write(tmp_path / "a", b"abc")
    (tmp_path / "link").symlink_to("a")
    FILES.make_directory(tmp_path / "d")
    assert FILES.list_directory(tmp_path) == {
        "a": EntryKind.FILE,
        "link": EntryKind.OTHER,
        "d": EntryKind.DIRECTORY,
    }
    assert FILES.status(tmp_path / "a").size_bytes == 3
    assert FILES.status(tmp_path / "link").kind is EntryKind.OTHER
    for refused in (FILES.read, FILES.sync_file):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            refused(tmp_path / "link")


LOCKING = """
import sys
from pathlib import Path
from rollsync.shell.store import RealFileSystem
try:
    RealFileSystem().lock(Path(sys.argv[1]))
except BlockingIOError:
    sys.exit(3)
"""


def test_a_lock_is_held_by_one_process(tmp_path: Path) -> None:
    def other_process() -> int:
        return subprocess.run([sys.executable, "-c", LOCKING, tmp_path / "lock"]).returncode

    held = FILES.lock(tmp_path / "lock")
    assert other_process() == 3
    held.release()
    held.release()
    assert other_process() == 0


def test_the_mount_table_names_the_file_system() -> None:
    table = (
        "/dev/sda / ext4 rw 0 0\ns3fs /mnt/my\\040bucket fuse.s3fs rw 0 0\n"
        "tmpfs /mnt tmpfs rw 0 0\nserver:/x /mnt nfs4 rw 0 0\n"
    )
    assert _mounted_type(table, "/home/a") == "ext4"
    assert _mounted_type(table, "/mnt/my bucket/run") == "fuse.s3fs"
    assert _mounted_type(table, "/mnt/my bucket2") == "nfs4", "the later mount hides the earlier"
    assert _mounted_type(table, "/mntx") == "ext4"
    assert _mounted_type("", "/") == "unknown"


def test_without_a_mount_table_the_type_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, encoding: str, errors: str) -> str:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert FILES.type_name(tmp_path) == "unknown"


def test_this_machines_file_system_will_do(tmp_path: Path) -> None:
    require_suitable(FILES, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert FILES.type_name(tmp_path) != "unknown"


class Named(RealFileSystem):
    """Claims to be of some type."""

    def type_name(self, path: Path) -> str:
        return "fuse.s3fs"


class WithoutFsync(RealFileSystem):
    def sync_directory(self, path: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


class Replacing(RealFileSystem):
    def rename(self, source: Path, target: Path) -> None:
        for inside in target.iterdir() if target.exists() else ():
            inside.unlink()
        os.rename(source, target)


class Full(RealFileSystem):
    def create(self, path: Path) -> WritableFile:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("unsuitable", [Named(), WithoutFsync(), Replacing()])
def test_an_unsuitable_file_system_is_refused_by_name(
    unsuitable: RealFileSystem, tmp_path: Path
) -> None:
    with pytest.raises(UnsuitableFileSystem, match=unsuitable.type_name(tmp_path)):
        require_suitable(unsuitable, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_called_unsuitable(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        require_suitable(Full(), tmp_path)
    assert not isinstance(caught.value, UnsuitableFileSystem)
    assert list(tmp_path.iterdir()) == []
