"""A bundle that is being written, and how it gets its name.

Rules kept here: what the manifest lists is what was hashed; every file, every directory and the
manifest are durable before the rename, and the rename's directory after it; an error before the
rename published nothing, one after it is only a doubt about durability.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from rollsync.codecs import encode
from rollsync.pure.snapshot.errors import UnsafeFileName
from rollsync.pure.snapshot.manifest import (
    MANIFEST_FILE,
    BundleFacts,
    RolloutSnapshotManifest,
    SnapshotFile,
    SnapshotSegment,
    manifest_of,
    unsafe_name,
)
from rollsync.shell.store.durable import (
    delete_tree,
    digest_of,
    files_below,
    measure,
    status_of,
    sync_tree,
    write_file,
)
from rollsync.shell.store.errors import StoreError
from rollsync.shell.store.filesystem import EntryKind, FileSystem

_logger = logging.getLogger(__name__)


class StoredDraft:
    """A directory that no reader looks at.

    Args:
        path: where it is; made already.
        final: the name that it will get, in the same directory.
        make_way: called just before the rename; raises `FileExistsError` if `final` is taken by
            something that may not go.
        published: called when the bundle has its name; also told whether that is durable.
        ended: called once, when the draft was published or abandoned.
    """

    def __init__(
        self,
        fs: FileSystem,
        path: Path,
        final: Path,
        *,
        fingerprint: str,
        segment_path: Callable[[str], Path],
        make_way: Callable[[], None],
        published: Callable[[RolloutSnapshotManifest, bool], None],
        ended: Callable[[], None],
    ) -> None:
        self._fs = fs
        self._path = path
        self._final = final
        self._fingerprint = fingerprint
        self._segment_path = segment_path
        self._make_way = make_way
        self._published = published
        self._ended = ended
        self._is_open = True

    @property
    def path(self) -> Path:
        return self._path

    def publish(self, facts: BundleFacts, files: Mapping[str, bytes]) -> Path:
        """See `rollsync.shell.rollout.archive.BundleDraft`."""
        for name, data in files.items():
            self._check_name(name)
            write_file(self._fs, self._path / name, data)
        listed = [
            SnapshotFile(name=name, size_bytes=len(data), digest=digest_of(data))
            for name, data in files.items()
        ]
        manifest = manifest_of(
            facts,
            fingerprint=self._fingerprint,
            files=(*listed, *self._others(files)),
            segments=tuple(self._segment(name) for name in facts.segments),
            state_segments=tuple(self._segment(name) for name in facts.state_segments),
        )
        write_file(self._fs, self._path / MANIFEST_FILE, encode(manifest))
        sync_tree(self._fs, self._path)
        self._make_way()
        self._rename()
        is_durable = True
        try:
            self._fs.sync_directory(self._final.parent)
        except OSError as error:
            is_durable = False
            _logger.warning(
                "%s is published, but may be gone after a power failure: %s", self._final, error
            )
        self._is_open = False
        self._published(manifest, is_durable)
        self._ended()
        return self._final

    def abandon(self) -> None:
        """See `rollsync.shell.rollout.archive.BundleDraft`. What cannot be deleted is left to the
        next save."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            delete_tree(self._fs, self._path)
        except OSError as error:
            _logger.warning("%s is left to the next save: %s", self._path, error)
        self._ended()

    def _rename(self) -> None:
        try:
            self._fs.rename(self._path, self._final)
        except OSError:
            # A network file system may lose the answer, send the rename once more, and report
            # that there is nothing to rename.
            if status_of(self._fs, self._path) is not None:
                raise
            if status_of(self._fs, self._final) is None:
                raise

    def _others(self, own: Mapping[str, bytes]) -> list[SnapshotFile]:
        """Files that others have put into the draft, durable and measured."""
        found = []
        for name, kind in files_below(self._fs, self._path):
            if name in own:
                continue
            self._check_name(name)
            if kind is not EntryKind.FILE:
                raise StoreError(
                    UnsafeFileName(path=str(self._path / name), why="it is no regular file")
                )
            self._fs.sync_file(self._path / name)
            found.append(measure(self._fs, self._path / name, name))
        return found

    def _check_name(self, name: str) -> None:
        why = unsafe_name(name)
        if why is not None:
            raise StoreError(UnsafeFileName(path=str(self._path / name), why=why))

    def _segment(self, name: str) -> SnapshotSegment:
        status = self._fs.status(self._segment_path(name))
        return SnapshotSegment(digest=name, size_bytes=status.size_bytes)
