"""The simulated disk forgets what was not synced, in every way, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.disk import Disk, Tree
from tests.crash.operations import Operation, SimulatedFileSystem, Verb, replay


def losses(disk: Disk) -> list[Tree]:
    found: list[Tree] = []
    for tree in disk.after_power_loss(0):
        if tree not in found:
            found.append(tree)
    return found


def test_content_and_name_are_durable_each_by_its_own_sync() -> None:
    disk = Disk()
    disk.create("/a")
    disk.append("/a", b"abcd")
    assert {} in losses(disk)
    assert {"a": b""} in losses(disk)
    assert {"a": b"ab"} in losses(disk)
    assert {"a": b"\0\0\0\0"} in losses(disk)
    disk.sync_file("/a")
    assert losses(disk) == [{}, {"a": b"abcd"}]
    disk.sync_directory("/")
    assert losses(disk) == [{"a": b"abcd"}]


def test_a_name_in_a_directory_without_a_name_is_lost() -> None:
    disk = Disk()
    disk.make_directory("/d")
    disk.create("/d/a")
    disk.sync_file("/d/a")
    disk.sync_directory("/d")
    assert losses(disk) == [{}, {"d": {"a": b""}}]


def test_a_rename_is_kept_whole_or_not_at_all() -> None:
    disk = Disk({"d": {"x": b"1"}, "old": b"2"})
    disk.rename("/d", "/e")
    disk.rename("/old", "/new")
    assert {frozenset(tree) for tree in losses(disk)} == {
        frozenset({"d", "old"}),
        frozenset({"e", "old"}),
        frozenset({"d", "new"}),
        frozenset({"e", "new"}),
    }
    disk.sync_directory("/")
    assert losses(disk) == [{"e": {"x": b"1"}, "new": b"2"}]


def test_later_changes_survive_without_earlier_ones() -> None:
    disk = Disk({"a": b"1", "b": b"2"})
    disk.remove_file("/a")
    disk.remove_file("/b")
    assert {"a": b"1"} in losses(disk)
    assert {"b": b"2"} in losses(disk)


def test_big_writes_are_torn_at_sectors_and_pages() -> None:
    disk = Disk({"a": b""})
    disk.append("/a", b"x" * 5000)
    sizes = {len(tree["a"]) for tree in losses(disk)}
    assert {0, 512, 1024, 4096, 4608, 5000} <= sizes
    assert {"a": bytes(512) + b"x" * 4488} in losses(disk)


def test_a_failed_sync_is_not_made_good_by_another() -> None:
    files = SimulatedFileSystem(Disk({}))
    file = files.create(Path("/a"))
    file.write(b"abc")
    files.fault = lambda _, operation: OSError(5, "") if operation.verb is Verb.SYNC_FILE else None
    with pytest.raises(OSError, match="5"):
        file.sync()
    files.fault = lambda _, __: None
    file.sync()
    files.sync_directory(Path("/"))
    assert b"".join(files.read(Path("/a"))) == b"abc"
    assert {"a": b""} in losses(files.disk)


def test_replaying_gives_the_disk_after_each_operation() -> None:
    files = SimulatedFileSystem()
    files.make_directory(Path("/d"))
    file = files.create(Path("/d/a"))
    file.write(b"abc")
    file.close()
    files.rename(Path("/d"), Path("/e"))
    states = [disk.visible() for disk in replay(Disk(), files.changes)]
    assert states == [{}, {"d": {}}, {"d": {"a": b""}}, {"d": {"a": b"abc"}}, {"e": {"a": b"abc"}}]
    assert files.operations[-1] == Operation(Verb.RENAME, "/d", target="/e")


def test_a_rename_does_not_replace() -> None:
    disk = Disk({"a": b"1", "b": b"2"})
    with pytest.raises(FileExistsError):
        disk.rename("/a", "/b")
