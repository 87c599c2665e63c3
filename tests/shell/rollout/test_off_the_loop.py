"""What takes time in a save or a restore is done in a thread: the event loop has a run to serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rollsync.shell.rollout import bundle_writer, restore, validation
from rollsync.shell.store import RealFileSystem
from rollsync.shell.store.filesystem import EntryKind, FileStatus, WritableFile
from tests.shell.rollout.world import World

SLOW_PARTS = (
    (bundle_writer, ("encode", "encode_segment", "keep", "plan_row_save", "after_save")),
    (bundle_writer, ("captured_state", "data_plane_metadata")),
    (validation, ("read_chain", "read_rows", "decode", "plan_resume", "take_inventory")),
    (restore, ("read_rows",)),
)


class Watched(RealFileSystem):
    """Tells of each call that touches the disk."""

    def __init__(self, called: Callable[[str], None]) -> None:
        self._called = called

    def create(self, path: Path) -> WritableFile:
        self._called("create")
        return super().create(path)

    def read(self, path: Path) -> Iterator[bytes]:
        self._called("read")
        return super().read(path)

    def sync_file(self, path: Path) -> None:
        self._called("sync_file")
        super().sync_file(path)

    def sync_directory(self, path: Path) -> None:
        self._called("sync_directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._called("rename")
        super().rename(source, target)

    def list_directory(self, path: Path) -> dict[str, EntryKind]:
        self._called("list_directory")
        return super().list_directory(path)

    def status(self, path: Path) -> FileStatus:
        self._called("status")
        return super().status(path)

    def remove_file(self, path: Path) -> None:
        self._called("remove_file")
        super().remove_file(path)


@pytest.mark.asyncio
async def test_encoding_hashing_reading_and_writing_are_done_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = threading.get_ident()
    elsewhere: set[str] = set()
    on_the_loop: list[str] = []

    def called(name: str) -> None:
        if threading.get_ident() == loop:
            on_the_loop.append(name)
        else:
            elsewhere.add(name)

    def watch(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def watched(*args: object, **keywords: object) -> object:
            called(f"{module.__name__}.{name}")
            return function(*args, **keywords)

        monkeypatch.setattr(module, name, watched)

    for module, names in SLOW_PARTS:
        for name in names:
            watch(module, name)
    world = World(tmp_path, store_on=Watched(called))
    for position in range(4):
        await world.ready(position)
        assert (await world.snapshotter.save_rollout_snapshot()).saved
    assert (await world.snapshotter.save_rollout_snapshot(force=True)).saved
    world.die()
    after = World(tmp_path, store_on=Watched(called))
    assert await after.restore() is not None
    assert set(after.state.replay) == set(world.state.replay)
    assert on_the_loop == []
    parts = {f"{module.__name__}.{name}" for module, names in SLOW_PARTS for name in names}
    files = {"create", "read", "sync_directory", "rename", "list_directory", "status"}
    assert elsewhere >= parts | files | {"remove_file"}, "nothing was left out of this test"
