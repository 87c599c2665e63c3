"""Reads a run directory: which bundles there are, and whether each is what its manifest says.

Rule kept here: reading writes nothing, and an error of the disk is a reason, not an end, as long
as there is something else to look at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.codecs import decode, describe
from rollsync.pure.snapshot.errors import DamagedBundleFile
from rollsync.pure.snapshot.lineage import BootstrapAnchor
from rollsync.pure.snapshot.manifest import (
    MANIFEST_FILE,
    SNAPSHOTS_DIRECTORY,
    BundleFacts,
    RolloutSnapshotManifest,
    SnapshotFile,
    is_of_rollout,
)
from rollsync.pure.snapshot.places import (
    ANCHOR_FILE,
    BOOTSTRAP_DIRECTORY,
    SEGMENTS_DIRECTORY,
    BundlePlace,
    anchor_name,
    is_segment,
    snapshot_name,
    snapshot_of,
    step_of,
)
from rollsync.pure.snapshot.selection import why_not_of_place
from rollsync.shell.store.durable import digest_of, measure, names_in, read_file, status_of
from rollsync.shell.store.errors import StoreError
from rollsync.shell.store.filesystem import EntryKind, FileSystem, reason_of

_LARGEST_BYTES: Final = 64 * 1024 * 1024
"""Of a manifest or an anchor, which are read whole: that of 300,000 files has less."""


class Fault(Struct, frozen=True, kw_only=True):
    """What is wrong with a bundle or the anchor."""

    why: str
    is_transient: bool = False
    """The disk could not answer; the content may be right."""


class Listing(Struct, frozen=True, kw_only=True):
    """The bundles of a run directory, by name only."""

    places: tuple[BundlePlace, ...]
    snapshots: tuple[Path, ...]
    """The directories that snapshots are in, also those that are not there."""
    unlisted: tuple[tuple[Path, str], ...]
    """Directories that could not be listed, and why."""


class RunReader:
    """Reads the run directory at `root`."""

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self.root = root
        self._fs = fs

    def anchor_path(self, step: int) -> Path:
        """Directory of a step's trainer checkpoint, or of the bootstrap anchor."""
        return self.root / anchor_name(step)

    def path(self, place: BundlePlace) -> Path:
        """Directory of a bundle."""
        if not place.is_snapshot:
            return self.anchor_path(place.step)
        return self.snapshots_path(place.step) / snapshot_name(place.number)

    def snapshots_path(self, step: int) -> Path:
        """Where the snapshots under an anchor are."""
        return self.anchor_path(step) / SNAPSHOTS_DIRECTORY

    @property
    def segments_path(self) -> Path:
        """Where the segments are."""
        return self.root / SEGMENTS_DIRECTORY

    def segment_path(self, name: str) -> Path:
        """Where a segment is."""
        return self.segments_path / name

    def names(self, directory: Path) -> tuple[str, ...]:
        """What is in a directory; nothing when it is not there."""
        return names_in(self._fs, directory)

    def listing(self) -> Listing:
        """Every bundle, in no particular order.

        Raises:
            OSError: the run directory itself cannot be listed.
        """
        places: list[BundlePlace] = []
        snapshots, unlisted = [], []
        for name in self.names(self.root):
            step = step_of(name)
            if step is None:
                continue
            if step > 0:
                places.append(BundlePlace(step=step, number=0))
            directory = self.snapshots_path(step)
            try:
                places.extend(self._snapshots(directory, step))
            except OSError as error:
                # Where a checkpoint itself is no directory, that is said of it, and once is enough.
                if step > 0 and self._is_no_directory(self.anchor_path(step)):
                    continue
                unlisted.append((directory, reason_of(error)))
            snapshots.append(directory)
        return Listing(places=tuple(places), snapshots=tuple(snapshots), unlisted=tuple(unlisted))

    def _snapshots(self, directory: Path, step: int) -> Iterator[BundlePlace]:
        for name in self.names(directory):
            number = snapshot_of(name)
            if number is not None:
                yield BundlePlace(step=step, number=number)

    def directories(self) -> tuple[Path, ...]:
        """Where what interrupted saves and removals have left can be."""
        snapshots = self.listing().snapshots
        return (self.root, self.segments_path, self.anchor_path(0), *snapshots)

    def segments(self) -> tuple[str, ...]:
        """Names of all segments on disk."""
        return tuple(filter(is_segment, self.names(self.segments_path)))

    def anchor(self) -> Result[BootstrapAnchor, Fault] | None:
        """The bootstrap anchor; None when there is none."""
        path = self.root / BOOTSTRAP_DIRECTORY / ANCHOR_FILE
        try:
            if status_of(self._fs, path) is None:
                return None
            fault = self._unreadable(path, str(path))
            if fault is not None:
                return Failure(fault)
            data = read_file(self._fs, path)
        except OSError as error:
            why = f"{path} cannot be read: {reason_of(error)}"
            return Failure(Fault(why=why, is_transient=True))
        decoded = decode(data, BootstrapAnchor)
        if not is_successful(decoded):
            return Failure(Fault(why=f"{path}: {describe(decoded.failure())}"))
        return Success(decoded.unwrap())

    def manifest(self, place: BundlePlace) -> Result[RolloutSnapshotManifest, Fault]:
        """A bundle's manifest, if it is one of that place."""
        path = self.path(place) / MANIFEST_FILE
        try:
            fault = self._unreadable(path, MANIFEST_FILE)
            if fault is not None and self._is_no_directory(path.parent):
                fault = Fault(why="it is no directory")
            if fault is not None:
                return Failure(fault)
            data = read_file(self._fs, path)
        except OSError as error:
            unread = f"{MANIFEST_FILE} cannot be read: {reason_of(error)}"
            return Failure(Fault(why=unread, is_transient=True))
        decoded = decode(data, RolloutSnapshotManifest)
        if not is_successful(decoded):
            return Failure(Fault(why=f"{MANIFEST_FILE}: {describe(decoded.failure())}"))
        why = why_not_of_place(decoded.unwrap(), place)
        return Success(decoded.unwrap()) if why is None else Failure(Fault(why=why))

    def verified(
        self,
        place: BundlePlace,
        *,
        contents: bool = True,
        segments: bool = True,
        trainer: bool = True,
        but_not: Collection[str] = (),
    ) -> Result[RolloutSnapshotManifest, Fault]:
        """A bundle's manifest, if the bundle is whole. Of a snapshot, this says nothing about the
        weights that it continues from (`Survey` does).

        Args:
            contents: compare digests; else names and sizes only.
            segments: look at the rollout state, too, and at the segments that it lists; else at
                the trainer's files only.
            but_not: segments that were compared already.
        """
        read = self.manifest(place)
        if not is_successful(read):
            return read
        manifest = read.unwrap()
        directory = self.path(place)
        files = [
            file for file in manifest.files if (segments if is_of_rollout(file.name) else trainer)
        ]
        wanted = [(directory / file.name, file.name, file) for file in files]
        for segment in manifest.shared if segments else ():
            if segment.digest in but_not:
                continue
            file = SnapshotFile(
                name=segment.digest, size_bytes=segment.size_bytes, digest=segment.digest
            )
            wanted.append((self.segment_path(segment.digest), f"segment {segment.digest}", file))
        for path, label, file in wanted:
            fault = self.compared(path, label, file, contents=contents)
            if fault is not None:
                return Failure(fault)
        return read

    def compared(
        self, path: Path, label: str, file: SnapshotFile, *, contents: bool
    ) -> Fault | None:
        """What is wrong with a file that should have this size and digest, or None."""
        try:
            fault = self._no_file(path, label)
            if fault is not None:
                return fault
            status = self._fs.status(path)
            if status.size_bytes != file.size_bytes:
                return Fault(
                    why=f"{label} has {status.size_bytes} bytes, "
                    f"the manifest says {file.size_bytes}"
                )
            if contents and measure(self._fs, path, file.name).digest != file.digest:
                return Fault(why=f"{label} has other content than the manifest says")
        except OSError as error:
            return Fault(why=f"{label} cannot be read: {reason_of(error)}", is_transient=True)
        return None

    def _unreadable(self, path: Path, label: str) -> Fault | None:
        """Why a manifest or an anchor is not to be read, or None."""
        fault = self._no_file(path, label)
        if fault is None and self._fs.status(path).size_bytes > _LARGEST_BYTES:
            return Fault(why=f"{label} has more than {_LARGEST_BYTES} bytes")
        return fault

    def _is_no_directory(self, path: Path) -> bool:
        try:
            self._fs.list_directory(path)
        except NotADirectoryError:
            return True
        except OSError:
            return False
        return False

    def _no_file(self, path: Path, label: str) -> Fault | None:
        status = status_of(self._fs, path)
        if status is None:
            return Fault(why=f"{label} is missing")
        if status.kind is not EntryKind.FILE:
            return Fault(why=f"{label} is no regular file")
        return None


class StoredBundle:
    """A bundle that was verified. Files are checked again when they are read."""

    def __init__(
        self,
        reader: RunReader,
        fs: FileSystem,
        place: BundlePlace,
        manifest: RolloutSnapshotManifest,
    ) -> None:
        self._reader = reader
        self._fs = fs
        self.place = place
        self._manifest = manifest

    @property
    def path(self) -> Path:
        return self._reader.path(self.place)

    @property
    def facts(self) -> BundleFacts:
        return self._manifest.facts

    @property
    def trainer_path(self) -> Path | None:
        return self._reader.anchor_path(self.place.step) if self.place.step > 0 else None

    def read(self, name: str) -> bytes:
        for file in self._manifest.files:
            if file.name == name:
                return self._read(self.path / name, file)
        raise StoreError(DamagedBundleFile(path=str(self.path / name), why="no file of the bundle"))

    def read_segment(self, name: str) -> bytes:
        for segment in self._manifest.shared:
            if segment.digest == name:
                file = SnapshotFile(name=name, size_bytes=segment.size_bytes, digest=name)
                return self._read(self._reader.segment_path(name), file)
        raise StoreError(DamagedBundleFile(path=str(self.path), why=f"it lists no segment {name}"))

    def _read(self, path: Path, file: SnapshotFile) -> bytes:
        try:
            data = read_file(self._fs, path)
        except OSError as error:
            raise StoreError(DamagedBundleFile(path=str(path), why=reason_of(error))) from error
        if digest_of(data) != file.digest:
            raise StoreError(DamagedBundleFile(path=str(path), why="it is not what was verified"))
        return data
