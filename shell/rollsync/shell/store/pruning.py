"""Finds out what is on disk and removes what retention no longer keeps.

Rules kept here: a bundle goes by losing its name first, durably; segments go after the bundles that
listed them; what was verified or published by this process is not read again.
"""

from __future__ import annotations

from pathlib import Path

from returns.pipeline import is_successful

from rollsync.pure.config import RetentionConfig
from rollsync.pure.snapshot.manifest import RolloutSnapshotManifest, SnapshotFile
from rollsync.pure.snapshot.places import BundlePlace
from rollsync.pure.snapshot.retention import (
    BundleCondition,
    ListedBundle,
    RetentionPlan,
    plan_retention,
)
from rollsync.shell.store.durable import delete_tree, displace
from rollsync.shell.store.filesystem import FileSystem
from rollsync.shell.store.reader import RunReader


class Survey:
    """What this process knows of the bundles on disk."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._manifests: dict[BundlePlace, RolloutSnapshotManifest] = {}
        self._doubtful: set[BundlePlace] = set()
        self._segments: set[str] = set()

    def trust(self, place: BundlePlace, manifest: RolloutSnapshotManifest) -> None:
        """The bundle is whole and durable, and so are its segments."""
        self._manifests[place] = manifest
        self._segments.update(segment.digest for segment in manifest.segments)

    def doubt(self, place: BundlePlace) -> None:
        """The bundle is whole, but may be gone after a power failure."""
        self._doubtful.add(place)

    def trust_segment(self, name: str) -> None:
        """The segment is whole and durable."""
        self._segments.add(name)

    def is_segment_whole(self, name: str, size_bytes: int) -> bool:
        """Whether the segment on disk is what its name says."""
        if name not in self._segments:
            file = SnapshotFile(name=name, size_bytes=size_bytes, digest=name)
            path = self._reader.segment_path(name)
            if self._reader.compared(path, name, file, contents=True) is not None:
                return False
            self._segments.add(name)
        return True

    def is_whole(self, place: BundlePlace) -> bool:
        """Whether there is a whole bundle at the place."""
        return place in self._manifests or is_successful(self._reader.verified(place))

    def listed(self, place: BundlePlace, *, contents: bool = False) -> ListedBundle:
        """What retention needs to know of a bundle."""
        manifest = self._manifests.get(place)
        condition = BundleCondition.WHOLE
        if manifest is None:
            checked = self._reader.verified_with_anchor(place, contents=contents)
            if not is_successful(checked):
                is_transient = checked.failure().is_transient
                condition = BundleCondition.UNKNOWN if is_transient else BundleCondition.DAMAGED
                checked = self._reader.manifest(place)
            manifest = checked.unwrap() if is_successful(checked) else None
        if place in self._doubtful:
            condition = BundleCondition.UNKNOWN
        segments = manifest.segments if manifest is not None else ()
        return ListedBundle(
            place=place,
            condition=condition,
            segments=tuple(segment.digest for segment in segments),
        )

    def forget(self, place: BundlePlace) -> None:
        """The bundle is gone."""
        self._manifests.pop(place, None)
        self._doubtful.discard(place)

    def forget_segment(self, name: str) -> None:
        """The segment is gone."""
        self._segments.discard(name)


def plan(
    reader: RunReader,
    survey: Survey,
    limits: RetentionConfig,
    *,
    protected: BundlePlace | None,
    protected_segments: frozenset[str],
    contents: bool = False,
) -> RetentionPlan:
    """What retention removes.

    Args:
        contents: compare the digests of what this process has not verified yet.

    Raises:
        OSError: a directory could not be listed, so that nothing can be decided.
    """
    listing = reader.listing()
    for path, why in listing.unlisted:
        raise OSError(f"{path} cannot be listed: {why}")
    return plan_retention(
        [survey.listed(place, contents=contents) for place in listing.places],
        limits,
        protected=protected,
        segments=reader.segments(),
        protected_segments=protected_segments,
    )


def prune(
    fs: FileSystem,
    reader: RunReader,
    survey: Survey,
    limits: RetentionConfig,
    *,
    protected: BundlePlace | None,
    protected_segments: frozenset[str],
) -> tuple[str, ...]:
    """Remove what retention no longer keeps; names relative to the run directory.

    Raises:
        OSError: something could not be removed. What can be, is.
    """
    decided = plan(
        reader, survey, limits, protected=protected, protected_segments=protected_segments
    )
    return carry_out(fs, reader, survey, decided)


def carry_out(
    fs: FileSystem, reader: RunReader, survey: Survey, decided: RetentionPlan
) -> tuple[str, ...]:
    """Remove what a plan says. Raises as `prune` does."""
    gone: list[Path] = []
    trash: list[Path] = []
    places = [BundlePlace(step=step, number=0) for step in decided.anchors]
    for place in (*places, *decided.snapshots):
        path = reader.path(place)
        survey.forget(place)
        trash.append(displace(fs, path))
        gone.append(path)
    segments = [reader.segment_path(name) for name in decided.segments]
    for name in decided.segments:
        survey.forget_segment(name)
    failed: OSError | None = None
    for path in (*trash, *segments):
        try:
            delete_tree(fs, path)
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return tuple(str(path.relative_to(reader.root)) for path in (*gone, *segments))
