"""A disk that forgets: what a crash may leave of operations that were not made durable.

Model: the content of a file is durable up to its last sync, names in a directory up to the
directory's last sync. Of everything after that, a crash keeps any part: a write is kept, dropped,
torn at a sector or a page, or replaced by zeros or garbage; a change of names (create, rename,
remove) is kept or dropped on its own, whatever happens to the others. A rename is one change. A
failed sync loses what it was to make durable although it can still be read, and a later sync of
the same file does not bring it back (as Linux does).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import PurePosixPath

Tree = dict[str, "bytes | Tree"]
"""A directory as a crash left it: content by name."""
SECTOR_BYTES = 512
PAGE_BYTES = 4096
_ALL_SUBSETS_UP_TO = 5
_RANDOM_SUBSETS = 12


@dataclass(eq=False)
class FileNode:
    """A file: what is durable, and what was appended since."""

    durable: bytes = b""
    unsynced: bytes = b""
    lost: bytes = b""
    """Appended, shown, and never to be durable: a sync of it has failed."""
    inode: int = 0
    modified_ns: int = 0

    @property
    def content(self) -> bytes:
        return self.durable + self.lost + self.unsynced


@dataclass(eq=False)
class DirectoryNode:
    """A directory: names as the processes see them, and those that are durable."""

    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    inode: int = 0
    modified_ns: int = 0


Node = FileNode | DirectoryNode


@dataclass(frozen=True, eq=False)
class NameChange:
    """One change of names that is not durable: `gone` loses its name, `there` gets one."""

    gone: tuple[DirectoryNode, str] | None
    there: tuple[DirectoryNode, str, Node] | None

    @property
    def synced_with(self) -> DirectoryNode:
        """The directory whose sync makes the change durable."""
        if self.there is not None:
            return self.there[0]
        assert self.gone is not None
        return self.gone[0]

    def apply(self, names_of: dict[DirectoryNode, dict[str, Node]]) -> None:
        if self.gone is not None:
            directory, name = self.gone
            names_of.setdefault(directory, dict(directory.durable)).pop(name, None)
        if self.there is not None:
            directory, name, node = self.there
            names_of.setdefault(directory, dict(directory.durable))[name] = node


class Disk:
    """What is on the disk and what is still on its way there."""

    def __init__(self, tree: Tree | None = None) -> None:
        self._inodes = count(1)
        self.root = DirectoryNode(inode=next(self._inodes))
        self.changes: list[NameChange] = []
        self._clock = count(1)
        if tree:
            self._fill(self.root, tree)

    def _fill(self, directory: DirectoryNode, tree: Tree) -> None:
        for name, item in tree.items():
            node: Node
            if isinstance(item, bytes):
                node = FileNode(durable=item, inode=next(self._inodes))
            else:
                node = DirectoryNode(inode=next(self._inodes))
                self._fill(node, item)
            directory.names[name] = directory.durable[name] = node

    # What processes do. Paths are absolute.

    def find(self, path: str) -> Node:
        node: Node = self.root
        for part in PurePosixPath(path).parts[1:]:
            if not isinstance(node, DirectoryNode):
                raise NotADirectoryError(20, "not a directory", path)
            if part not in node.names:
                raise FileNotFoundError(2, "no such file or directory", path)
            node = node.names[part]
        return node

    def directory(self, path: str) -> DirectoryNode:
        node = self.find(path)
        if not isinstance(node, DirectoryNode):
            raise NotADirectoryError(20, "not a directory", path)
        return node

    def file(self, path: str) -> FileNode:
        node = self.find(path)
        if not isinstance(node, FileNode):
            raise IsADirectoryError(21, "is a directory", path)
        return node

    def create(self, path: str) -> None:
        self._add(path, FileNode(inode=next(self._inodes), modified_ns=next(self._clock)))

    def make_directory(self, path: str) -> None:
        self._add(path, DirectoryNode(inode=next(self._inodes), modified_ns=next(self._clock)))

    def _add(self, path: str, node: Node) -> None:
        parent, name = self._parent(path)
        if name in parent.names:
            raise FileExistsError(17, "exists", path)
        self._change(NameChange(gone=None, there=(parent, name, node)))

    def append(self, path: str, data: bytes) -> None:
        node = self.file(path)
        node.unsynced += data
        node.modified_ns = next(self._clock)

    def sync_file(self, path: str) -> None:
        node = self.file(path)
        if not node.lost:
            node.durable, node.unsynced = node.content, b""

    def fail_sync_file(self, path: str) -> None:
        """A sync that reported an error: what it was about is not going to be durable."""
        node = self.file(path)
        node.lost, node.unsynced = node.lost + node.unsynced, b""

    def sync_directory(self, path: str) -> None:
        directory = self.directory(path)
        synced = [change for change in self.changes if change.synced_with is directory]
        self.changes = [change for change in self.changes if change.synced_with is not directory]
        names_of: dict[DirectoryNode, dict[str, Node]] = {}
        for change in synced:
            change.apply(names_of)
        for node, names in names_of.items():
            node.durable = names

    def rename(self, source: str, target: str) -> None:
        from_parent, from_name = self._parent(source)
        node = self.find(source)
        to_parent, to_name = self._parent(target)
        if to_name in to_parent.names:
            raise FileExistsError(17, "exists", target)
        self._change(NameChange(gone=(from_parent, from_name), there=(to_parent, to_name, node)))

    def remove_file(self, path: str) -> None:
        self.file(path)
        self._change(NameChange(gone=self._parent(path), there=None))

    def remove_directory(self, path: str) -> None:
        if self.directory(path).names:
            raise OSError(39, "directory not empty", path)
        self._change(NameChange(gone=self._parent(path), there=None))

    def _parent(self, path: str) -> tuple[DirectoryNode, str]:
        pure = PurePosixPath(path)
        return self.directory(str(pure.parent)), pure.name

    def _change(self, change: NameChange) -> None:
        self.changes.append(change)
        if change.gone is not None:
            directory, name = change.gone
            del directory.names[name]
            directory.modified_ns = next(self._clock)
        if change.there is not None:
            directory, name, node = change.there
            directory.names[name] = node
            directory.modified_ns = next(self._clock)

    # What is left.

    def visible(self) -> Tree:
        """What processes see: left by a crash of a process, with the machine still up."""
        return _tree(self.root, {}, {}, visible=True)

    def after_power_loss(self, seed: int) -> Iterator[Tree]:
        """What the machine may find when it comes up again. Not all different.

        Every subset of up to five changes of names is tried, and of more a wide selection; each
        with the unsynced writes all kept, all dropped, all garbage and mixed; and each way to
        damage each single write, with all names kept.
        """
        rng = random.Random(seed)
        everything = tuple(range(len(self.changes)))
        for kept in _subsets(len(self.changes), rng):
            names_of = self._names(kept)
            dirty = list(_dirty_files(self.root, names_of, set()))
            yield _tree(self.root, names_of, {})
            if dirty:
                yield _tree(self.root, names_of, {file: file.durable for file in dirty})
                yield _tree(self.root, names_of, {file: _garbage(file, rng) for file in dirty})
                mixed = {file: rng.choice(list(_damages(file, rng))) for file in dirty}
                yield _tree(self.root, names_of, mixed)
        names_of = self._names(everything)
        for file in _dirty_files(self.root, names_of, set()):
            for content in _damages(file, rng):
                yield _tree(self.root, names_of, {file: content})

    def some_power_loss(self, rng: random.Random) -> Tree:
        """One of the things that the machine may find, at random."""
        kept = [index for index in range(len(self.changes)) if rng.random() < 0.6]
        names_of = self._names(kept)
        dirty = list(_dirty_files(self.root, names_of, set()))
        contents = {file: rng.choice(list(_damages(file, rng))) for file in dirty}
        return _tree(self.root, names_of, contents)

    def _names(self, kept: Iterable[int]) -> dict[DirectoryNode, dict[str, Node]]:
        names_of: dict[DirectoryNode, dict[str, Node]] = {}
        for index in kept:
            self.changes[index].apply(names_of)
        return names_of


def _tree(
    directory: DirectoryNode,
    names_of: dict[DirectoryNode, dict[str, Node]],
    contents: dict[FileNode, bytes],
    *,
    visible: bool = False,
) -> Tree:
    names = directory.names if visible else names_of.get(directory, directory.durable)
    tree: Tree = {}
    for name, node in names.items():
        if isinstance(node, DirectoryNode):
            tree[name] = _tree(node, names_of, contents, visible=visible)
        elif visible:
            tree[name] = node.content
        else:
            tree[name] = contents.get(node, node.durable + node.unsynced)
    return tree


def _dirty_files(
    directory: DirectoryNode,
    names_of: dict[DirectoryNode, dict[str, Node]],
    seen: set[FileNode],
) -> Iterator[FileNode]:
    for node in names_of.get(directory, directory.durable).values():
        if isinstance(node, DirectoryNode):
            yield from _dirty_files(node, names_of, seen)
        elif (node.unsynced or node.lost) and node not in seen:
            seen.add(node)
            yield node


def _subsets(size: int, rng: random.Random) -> Iterator[tuple[int, ...]]:
    everything = tuple(range(size))
    if size <= _ALL_SUBSETS_UP_TO:
        for bits in range(1 << size):
            yield tuple(index for index in everything if bits >> index & 1)
        return
    for cut in range(size + 1):
        yield everything[:cut]
        yield everything[cut:]
    for index in everything:
        yield (index,)
        yield everything[:index] + everything[index + 1 :]
    for _ in range(_RANDOM_SUBSETS):
        yield tuple(index for index in everything if rng.random() < 0.5)


def _garbage(file: FileNode, rng: random.Random) -> bytes:
    return file.durable + rng.randbytes(len(file.lost) + len(file.unsynced))


def _damages(file: FileNode, rng: random.Random) -> Iterator[bytes]:
    """What may have become of the writes to a file since its last sync."""
    durable, written = file.durable, file.lost + file.unsynced
    yield durable
    yield durable + written
    yield durable + bytes(len(written))
    yield _garbage(file, rng)
    yield durable + written[: len(written) // 2]
    for unit in (SECTOR_BYTES, PAGE_BYTES):
        cuts = range(unit, len(written), unit)
        for cut in [*cuts[:2], *cuts[-1:]]:
            rest = len(written) - cut
            yield durable + written[:cut]
            yield durable + written[:cut] + bytes(rest)
            yield durable + bytes(cut) + written[cut:]
            yield durable + written[:cut] + rng.randbytes(min(unit, rest)) + written[cut + unit :]
