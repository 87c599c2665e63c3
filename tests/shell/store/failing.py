"""The real file system, except that a test decides which call fails."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rollsync.shell.store import RealFileSystem
from rollsync.shell.store.filesystem import EntryKind, WritableFile


class FailingFileSystem(RealFileSystem):
    """Fails calls of the given names on paths that the given expression is found in.

    `failing` has pairs like `("sync_directory", "snapshots$")`.
    """

    def __init__(self, *failing: tuple[str, str], error_number: int = errno.EIO) -> None:
        self.failing = list(failing)
        self.error_number = error_number
        self.failed = 0
        self.type = ""

    def _may_fail(self, call: str, path: Path) -> None:
        if any(name == call and re.search(text, str(path)) for name, text in self.failing):
            self.failed += 1
            raise OSError(self.error_number, os.strerror(self.error_number), str(path))

    def create(self, path: Path) -> WritableFile:
        self._may_fail("create", path)
        return super().create(path)

    def read(self, path: Path) -> Iterator[bytes]:
        self._may_fail("read", path)
        return super().read(path)

    def sync_file(self, path: Path) -> None:
        self._may_fail("sync_file", path)
        super().sync_file(path)

    def sync_directory(self, path: Path) -> None:
        self._may_fail("sync_directory", path)
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._may_fail("rename", target)
        super().rename(source, target)
        self._may_fail("rename and say that it failed", target)

    def remove_file(self, path: Path) -> None:
        self._may_fail("remove_file", path)
        super().remove_file(path)

    def list_directory(self, path: Path) -> dict[str, EntryKind]:
        self._may_fail("list_directory", path)
        return super().list_directory(path)

    def type_name(self, path: Path) -> str:
        return self.type or super().type_name(path)
