"""Operations on a simulated disk, one by one, and a file system that writes them down.

What the store did is a list of `Operation`s. A test replays any beginning of it, changes it (leaves
out a sync, moves a rename) and replays that, or has the file system fail at any of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rollsync.shell.store.filesystem import EntryKind, FileStatus, Lock, WritableFile
from tests.crash.disk import DirectoryNode, Disk, FileNode, Node, Tree


class Verb(Enum):
    """What an operation does."""

    CREATE = "create"
    WRITE = "write"
    SYNC_FILE = "sync file"
    SYNC_DIRECTORY = "sync directory"
    RENAME = "rename"
    MAKE_DIRECTORY = "make directory"
    REMOVE_FILE = "remove file"
    REMOVE_DIRECTORY = "remove directory"
    CLOSE = "close"
    READ = "read"
    LIST = "list"
    STATUS = "status"


CHANGING = frozenset(Verb) - {Verb.READ, Verb.LIST, Verb.STATUS, Verb.CLOSE}
SYNCS = frozenset({Verb.SYNC_FILE, Verb.SYNC_DIRECTORY})


@dataclass(frozen=True)
class Operation:
    """One call."""

    verb: Verb
    path: str
    data: bytes = b""
    target: str = ""

    def __str__(self) -> str:
        detail = f" -> {self.target}" if self.target else ""
        size = f" ({len(self.data)} bytes)" if self.data else ""
        return f"{self.verb.value} {self.path}{detail}{size}"

    def apply(self, disk: Disk) -> None:
        """Do it."""
        match self.verb:
            case Verb.CREATE:
                disk.create(self.path)
            case Verb.WRITE:
                disk.append(self.path, self.data)
            case Verb.SYNC_FILE:
                disk.sync_file(self.path)
            case Verb.SYNC_DIRECTORY:
                disk.sync_directory(self.path)
            case Verb.RENAME:
                disk.rename(self.path, self.target)
            case Verb.MAKE_DIRECTORY:
                disk.make_directory(self.path)
            case Verb.REMOVE_FILE:
                disk.remove_file(self.path)
            case Verb.REMOVE_DIRECTORY:
                disk.remove_directory(self.path)
            case Verb.READ | Verb.LIST | Verb.STATUS | Verb.CLOSE:
                pass


def replay(before: Disk, operations: list[Operation]) -> Iterator[Disk]:
    """The disk before the first operation, and after each of them. One object, changed in place."""
    disk = deepcopy(before)
    yield disk
    for operation in operations:
        operation.apply(disk)
        yield disk


Fault = Callable[[int, Operation], "OSError | int | None"]
"""Asked before each operation: an error to raise instead, or how many bytes a write takes, or
None."""


def no_fault(_: int, __: Operation) -> None:
    """Everything works."""


@dataclass
class SimulatedFileSystem:
    """A `FileSystem` on a simulated disk."""

    disk: Disk = field(default_factory=Disk)
    fault: Fault = no_fault
    operations: list[Operation] = field(default_factory=list)
    """Everything that was asked, also what failed."""
    locked: set[Path] = field(default_factory=set)

    @classmethod
    def after(cls, tree: Tree) -> SimulatedFileSystem:
        """A machine that has come up with this on its disk."""
        return cls(Disk(tree))

    @property
    def changes(self) -> list[Operation]:
        """The operations that change the disk or make it durable."""
        return [operation for operation in self.operations if operation.verb in CHANGING]

    def _do(self, operation: Operation) -> None:
        index = len(self.operations)
        self.operations.append(operation)
        failure = self.fault(index, operation)
        if isinstance(failure, OSError):
            if operation.verb is Verb.SYNC_FILE:
                self.disk.fail_sync_file(operation.path)
            raise failure
        try:
            operation.apply(self.disk)
        except OSError:
            # It changed nothing, as a look would.
            self.operations[index] = Operation(Verb.STATUS, operation.path)
            raise

    def create(self, path: Path) -> WritableFile:
        self._do(Operation(Verb.CREATE, str(path)))
        return _SimulatedFile(self, str(path), self.disk.file(str(path)))

    def append(self, path: Path) -> WritableFile:
        if path.name not in self.disk.directory(str(path.parent)).names:
            return self.create(path)
        return _SimulatedFile(self, str(path), self.disk.file(str(path)))

    def write(self, path: str, data: bytes) -> int:
        operation = Operation(Verb.WRITE, path, data)
        index = len(self.operations)
        self.operations.append(operation)
        answer = self.fault(index, operation)
        if isinstance(answer, OSError):
            raise answer
        written = data if answer is None else data[:answer]
        self.operations[index] = Operation(Verb.WRITE, path, written)
        self.disk.append(path, written)
        return len(written)

    def write_as_others(self, path: Path, data: bytes) -> None:
        """What a trainer or an environment does: a file, perhaps in new directories, and nothing
        of it durable."""
        for directory in reversed(path.parents):
            try:
                self.disk.directory(str(directory))
            except FileNotFoundError:
                self._do(Operation(Verb.MAKE_DIRECTORY, str(directory)))
        self._do(Operation(Verb.CREATE, str(path)))
        left = data
        while left:
            left = left[self.write(str(path), left[: len(data) // 2 + 1]) :]

    def read(self, path: Path) -> Iterator[bytes]:
        self._do(Operation(Verb.READ, str(path)))
        content = self.disk.file(str(path)).content
        middle = len(content) // 2
        return iter([piece for piece in (content[:middle], content[middle:]) if piece])

    def sync_file(self, path: Path) -> None:
        self._do(Operation(Verb.SYNC_FILE, str(path)))

    def sync_directory(self, path: Path) -> None:
        self._do(Operation(Verb.SYNC_DIRECTORY, str(path)))

    def rename(self, source: Path, target: Path) -> None:
        self._do(Operation(Verb.RENAME, str(source), target=str(target)))

    def make_directory(self, path: Path) -> None:
        self._do(Operation(Verb.MAKE_DIRECTORY, str(path)))

    def list_directory(self, path: Path) -> dict[str, EntryKind]:
        self._do(Operation(Verb.LIST, str(path)))
        names = self.disk.directory(str(path)).names
        # The other way round than they were made: no order means anything.
        return {name: _kind(names[name]) for name in reversed(names)}

    def status(self, path: Path) -> FileStatus:
        self._do(Operation(Verb.STATUS, str(path)))
        node = self.disk.find(str(path))
        return FileStatus(
            kind=_kind(node),
            size_bytes=len(node.content) if isinstance(node, FileNode) else 0,
            modified_ns=node.modified_ns,
            inode=node.inode,
        )

    def remove_file(self, path: Path) -> None:
        self._do(Operation(Verb.REMOVE_FILE, str(path)))

    def remove_directory(self, path: Path) -> None:
        self._do(Operation(Verb.REMOVE_DIRECTORY, str(path)))

    def lock(self, path: Path) -> Lock:
        if path in self.locked:
            raise BlockingIOError(11, os.strerror(11), str(path))
        parent = self.disk.directory(str(path.parent))
        if path.name not in parent.names:
            self._do(Operation(Verb.CREATE, str(path)))
        self.locked.add(path)
        return _SimulatedLock(self, path)

    def type_name(self, path: Path) -> str:
        return "simulated"


@dataclass
class _SimulatedFile:
    files: SimulatedFileSystem
    path: str
    node: FileNode

    def write(self, data: bytes | memoryview) -> int:
        return self.files.write(self.path, bytes(data))

    def sync(self) -> None:
        self.files.sync_file(Path(self.path))

    def close(self) -> None:
        self.files._do(Operation(Verb.CLOSE, self.path))


@dataclass
class _SimulatedLock:
    files: SimulatedFileSystem
    path: Path

    def release(self) -> None:
        self.files.locked.discard(self.path)


def _kind(node: Node) -> EntryKind:
    return EntryKind.DIRECTORY if isinstance(node, DirectoryNode) else EntryKind.FILE
