"""Looks at a run directory from outside, for people: `rollsync verify` and `rollsync gc`.

Rules kept here: `examine` writes nothing; `collect` takes the writer's lock, so it never meets a
run that is saving; neither needs to know the run's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
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
)
from rollsync.pure.snapshot.retention import RetentionPlan
from rollsync.pure.snapshot.selection import resume_order, why_not_of_run
from rollsync.shell.store.durable import files_below, names_in, sweep
from rollsync.shell.store.errors import StoreError
from rollsync.shell.store.filesystem import EntryKind, FileSystem
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
    """Verify every bundle of a run directory, whatever run it is.

    Raises:
        StoreError: the directory cannot be listed, or is none.
    """
    reader = RunReader(root, fs)
    listing = _listing(reader, fs)
    survey = Survey(reader)
    bundles = tuple(_report(reader, survey, place) for place in resume_order(listing.places))
    problems = [f"{path}: {why}" for path, why in listing.unlisted]
    anchor = reader.anchor()
    if anchor is not None and not is_successful(anchor):
        problems.append(anchor.failure().why)
    elif anchor is None and bundles:
        problems.append(f"{BOOTSTRAP_DIRECTORY}: the run's anchor is missing")
    elif anchor is not None:
        problems.extend(_strangers(reader, listing, anchor.unwrap().fingerprint))
    return RunReport(
        bundles=bundles,
        has_anchor=anchor is not None,
        problems=tuple(problems),
        notes=tuple(_notes(reader, fs, survey, listing)),
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
        raise StoreError(UnreadableDirectory(directory=str(reader.root), why=str(error))) from error


def _report(reader: RunReader, survey: Survey, place: BundlePlace) -> BundleReport:
    checked = survey.checked(place)
    readable = checked if is_successful(checked) else reader.manifest(place)
    manifest = readable.unwrap() if is_successful(readable) else None
    sizes = (
        []
        if manifest is None
        else [
            *(file.size_bytes for file in manifest.files),
            *(segment.size_bytes for segment in manifest.segments),
        ]
    )
    return BundleReport(
        path=str(reader.path(place).relative_to(reader.root)),
        problem=None if is_successful(checked) else checked.failure().why,
        files=0 if manifest is None else len(manifest.files),
        segments=0 if manifest is None else len(manifest.segments),
        size_bytes=sum(sizes),
    )


def _strangers(reader: RunReader, listing: Listing, fingerprint: str) -> Iterator[str]:
    for place in resume_order(listing.places):
        manifest = reader.manifest(place)
        if is_successful(manifest):
            why = why_not_of_run(manifest.unwrap(), fingerprint)
            if why is not None:
                yield f"{reader.path(place).relative_to(reader.root)}: {why}"


def _notes(reader: RunReader, fs: FileSystem, survey: Survey, listing: Listing) -> Iterator[str]:
    for path in _leftovers(reader, fs):
        left = path.relative_to(reader.root)
        yield f"{left}: left by an interrupted save; the next one removes it"
    listed = [survey.listed(place, contents=True) for place in listing.places]
    if all(bundle.segments is not None for bundle in listed):
        needed = {name for bundle in listed for name in bundle.segments or ()}
        for name in reader.segments():
            if name not in needed:
                yield f"{SEGMENTS_DIRECTORY}/{name}: no bundle needs it"
    for place in resume_order(listing.places):
        manifest = reader.manifest(place)
        if is_successful(manifest):
            known = {MANIFEST_FILE, *(file.name for file in manifest.unwrap().files)}
            for name, _ in files_below(fs, reader.path(place)):
                if name not in known and name.split("/")[0] != SNAPSHOTS_DIRECTORY:
                    path = (reader.path(place) / name).relative_to(reader.root)
                    yield f"{path}: not in the manifest; nobody reads it"


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
