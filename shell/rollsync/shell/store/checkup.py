"""Looks at a run directory from outside, for people: `rollsync verify` and `rollsync gc`.

Rules kept here: `examine` writes nothing; `collect` takes the writer's lock, so it never meets a
run that is saving; neither needs to know the run's configuration.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from msgspec import Struct
from returns.pipeline import is_successful

from rollsync.pure.config import RetentionConfig
from rollsync.pure.snapshot.errors import DirectoryInUse, UnreadableDirectory
from rollsync.pure.snapshot.manifest import MANIFEST_FILE, SNAPSHOTS_DIRECTORY
from rollsync.pure.snapshot.places import (
    BOOTSTRAP_DIRECTORY,
    LOCK_FILE,
    SEGMENTS_DIRECTORY,
    BundlePlace,
    is_leftover,
    is_segment,
)
from rollsync.pure.snapshot.retention import RetentionPlan
from rollsync.pure.snapshot.selection import resume_order, why_not_of_run
from rollsync.shell.store.durable import files_below, names_in, status_of, sweep
from rollsync.shell.store.errors import StoreError
from rollsync.shell.store.filesystem import EntryKind, FileSystem, reason_of
from rollsync.shell.store.pruning import carry_out, plan
from rollsync.shell.store.reader import Listing, RunReader
from rollsync.shell.store.survey import Survey


class BundleReport(Struct, frozen=True, kw_only=True):
    """One bundle of a run directory."""

    path: str
    """Relative to the run directory."""
    problem: str | None
    """None: every file is what the manifest says."""
    files: int
    segments: int
    size_bytes: int
    """With the segments, which other bundles may share."""


class RunReport(Struct, frozen=True, kw_only=True):
    """A run directory."""

    bundles: tuple[BundleReport, ...]
    """In the order in which a resume tries them."""
    has_anchor: bool
    """Whether a run has written its identity here, whole or not."""
    problems: tuple[str, ...]
    """What is wrong beside the bundles."""
    notes: tuple[str, ...]
    """What is there for nothing: half-written bundles, segments without a bundle, other files."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and all(bundle.problem is None for bundle in self.bundles)


class Collected(Struct, frozen=True, kw_only=True):
    """What retention removes from a run directory."""

    names: tuple[str, ...]
    """Relative to it: checkpoints, snapshots, segments, leftovers."""
    size_bytes: int


def examine(root: Path, fs: FileSystem) -> RunReport:
    """Verify every bundle of a run directory, whatever run it is and whatever lies in it.

    Raises:
        StoreError: the directory cannot be listed, or is none.
    """
    reader = RunReader(root, fs)
    listing = _listing(reader, fs)
    survey = Survey(reader)
    bundles = tuple(_report(reader, survey, place) for place in resume_order(listing.places))
    found = _Findings(reader, fs, listing)
    found.look_at_lock()
    found.look_at_anchor()
    found.look_for_leftovers()
    found.look_at_segments(survey)
    found.look_for_other_files()
    return RunReport(
        bundles=bundles,
        has_anchor=found.has_anchor,
        problems=tuple(found.problems),
        notes=tuple(found.notes),
    )


def is_run_directory(root: Path, fs: FileSystem) -> bool:
    """Whether a run has saved here, or begun to: directories that are only called like a
    checkpoint are somebody else's.

    Raises:
        StoreError: the directory cannot be listed, or is none.
    """
    reader = RunReader(root, fs)
    listing = _listing(reader, fs)
    return reader.anchor() is not None or any(
        is_successful(reader.manifest(place)) for place in listing.places
    )


def collect(root: Path, fs: FileSystem, limits: RetentionConfig, *, dry_run: bool) -> Collected:
    """Remove what retention does not keep, and leftovers. Every byte is compared before.

    Args:
        dry_run: only say what would go; writes nothing.

    Raises:
        StoreError: the directory cannot be listed, or a run is writing to it.
        OSError: something could not be removed. What can be, is.
    """
    reader = RunReader(root, fs)
    _listing(reader, fs)
    survey = Survey(reader)
    if dry_run:
        return _collected(reader, fs, _decide(reader, survey, limits))
    try:
        lock = fs.lock(root / LOCK_FILE)
    except BlockingIOError as error:
        raise StoreError(DirectoryInUse(directory=str(root))) from error
    try:
        decided = _decide(reader, survey, limits)
        collected = _collected(reader, fs, decided)
        for directory in reader.directories():
            sweep(fs, directory)
        carry_out(fs, reader, survey, decided)
    finally:
        lock.release()
    return collected


def _decide(reader: RunReader, survey: Survey, limits: RetentionConfig) -> RetentionPlan:
    return plan(reader, survey, limits, protected=(), protected_segments=frozenset(), contents=True)


def _listing(reader: RunReader, fs: FileSystem) -> Listing:
    try:
        fs.list_directory(reader.root)
        return reader.listing()
    except OSError as error:
        raise StoreError(
            UnreadableDirectory(directory=str(reader.root), why=reason_of(error))
        ) from error


def _report(reader: RunReader, survey: Survey, place: BundlePlace) -> BundleReport:
    checked = survey.checked(place)
    readable = checked if is_successful(checked) else reader.manifest(place)
    manifest = readable.unwrap() if is_successful(readable) else None
    sizes = (
        []
        if manifest is None
        else [
            *(file.size_bytes for file in manifest.files),
            *(segment.size_bytes for segment in manifest.shared),
        ]
    )
    return BundleReport(
        path=str(reader.path(place).relative_to(reader.root)),
        problem=None if is_successful(checked) else checked.failure().why,
        files=0 if manifest is None else len(manifest.files),
        segments=0 if manifest is None else len(manifest.shared),
        size_bytes=sum(sizes),
    )


class _Findings:
    """What there is to say of a run directory beside its bundles. What cannot be looked at is a
    problem itself, and keeps nothing else from being looked at."""

    def __init__(self, reader: RunReader, fs: FileSystem, listing: Listing) -> None:
        self._reader = reader
        self._fs = fs
        self._places = resume_order(listing.places)
        self.has_anchor = False
        self.problems: list[str] = []
        self.notes: list[str] = []
        for path, why in listing.unlisted:
            self._cannot_list(path, why)

    def look_at_lock(self) -> None:
        """A run can only save where it can take the lock."""
        status = status_of(self._fs, self._reader.root / LOCK_FILE)
        if status is not None and status.kind is not EntryKind.FILE:
            self.problems.append(f"{LOCK_FILE} is no regular file: no run can save here")

    def look_at_anchor(self) -> None:
        """Whether it is whole, and which bundles are not of its run."""
        anchor = self._reader.anchor()
        if anchor is None:
            if self._places:
                self.problems.append(f"{BOOTSTRAP_DIRECTORY}: the run's anchor is missing")
            return
        self.has_anchor = True
        if not is_successful(anchor):
            self.problems.append(anchor.failure().why)
            return
        for place in self._places:
            manifest = self._reader.manifest(place)
            if is_successful(manifest):
                why = why_not_of_run(manifest.unwrap(), anchor.unwrap().fingerprint)
                if why is not None:
                    self.problems.append(f"{self._shown(self._reader.path(place))}: {why}")

    def look_for_leftovers(self) -> None:
        """What interrupted saves and removals have left."""
        for directory in self._reader.directories():
            for name in filter(is_leftover, self._names(directory)):
                left = self._shown(directory / name)
                self.notes.append(f"{left}: left by an interrupted save; the next one removes it")

    def look_at_segments(self, survey: Survey) -> None:
        """Which of them no bundle needs, if that can be known."""
        listed = [survey.listed(place, contents=True) for place in self._places]
        if any(bundle.segments is None for bundle in listed):
            return
        needed = {name for bundle in listed for name in bundle.segments or ()}
        for name in self._names(self._reader.segments_path):
            if is_segment(name) and name not in needed:
                self.notes.append(f"{SEGMENTS_DIRECTORY}/{name}: no bundle needs it")

    def look_for_other_files(self) -> None:
        """What lies in a bundle and is not of it."""
        for place in self._places:
            manifest = self._reader.manifest(place)
            if is_successful(manifest):
                known = {MANIFEST_FILE, *(file.name for file in manifest.unwrap().files)}
                self._look_for_others(self._reader.path(place), known)

    def _look_for_others(self, directory: Path, known: Collection[str]) -> None:
        try:
            for name, _ in files_below(self._fs, directory, but_not=SNAPSHOTS_DIRECTORY):
                if name not in known:
                    other = self._shown(directory / name)
                    self.notes.append(f"{other}: not in the manifest; nobody reads it")
        except OSError as error:
            path = directory if error.filename is None else Path(error.filename)
            self._cannot_list(path, reason_of(error))

    def _names(self, directory: Path) -> tuple[str, ...]:
        try:
            return names_in(self._fs, directory)
        except OSError as error:
            self._cannot_list(directory, reason_of(error))
            return ()

    def _cannot_list(self, path: Path, why: str) -> None:
        problem = f"{self._shown(path)} cannot be listed: {why}"
        if problem not in self.problems:
            self.problems.append(problem)

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self._reader.root))


def _leftovers(reader: RunReader, fs: FileSystem) -> tuple[Path, ...]:
    return tuple(
        directory / name
        for directory in reader.directories()
        for name in filter(is_leftover, names_in(fs, directory))
    )


def _collected(reader: RunReader, fs: FileSystem, decided: RetentionPlan) -> Collected:
    paths = [
        *(reader.anchor_path(step) for step in decided.anchors),
        *(reader.path(place) for place in decided.snapshots),
        *(reader.segment_path(name) for name in decided.segments),
        *_leftovers(reader, fs),
    ]
    return Collected(
        names=tuple(str(path.relative_to(reader.root)) for path in paths),
        size_bytes=sum(_size(fs, path) for path in paths),
    )


def _size(fs: FileSystem, path: Path) -> int:
    status = fs.status(path)
    if status.kind is not EntryKind.DIRECTORY:
        return status.size_bytes
    return sum(fs.status(path / name).size_bytes for name, _ in files_below(fs, path))
