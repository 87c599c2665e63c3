"""Removes what retention no longer keeps.

Rules kept here: a bundle goes by losing its name first, durably; segments go after the bundles that
listed them; what cannot be deleted keeps nothing else from being deleted.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from rollsync.pure.config import RetentionConfig
from rollsync.pure.snapshot.places import BundlePlace
from rollsync.pure.snapshot.retention import (
    RetentionPlan,
    plan_retention,
)
from rollsync.shell.store.durable import delete_all, displace
from rollsync.shell.store.filesystem import FileSystem
from rollsync.shell.store.reader import RunReader
from rollsync.shell.store.survey import Survey


def plan(
    reader: RunReader,
    survey: Survey,
    limits: RetentionConfig,
    *,
    protected: Collection[BundlePlace],
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
        raise OSError(errno.EIO, f"cannot be listed ({why}), so nothing can be decided", str(path))
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
    protected: Collection[BundlePlace],
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
    failures: list[OSError] = []
    places = [BundlePlace(step=step, number=0) for step in decided.anchors]
    gone, trash = [], []
    for place in (*places, *decided.snapshots):
        survey.forget(place)
        try:
            trash.append(displace(fs, reader.path(place)))
        except OSError as error:
            failures.append(error)
        else:
            gone.append(reader.path(place))
    # A bundle that kept its name, or may have it again after a power failure, needs its segments.
    segments = () if failures else decided.segments
    for name in segments:
        survey.forget_segment(name)
    gone.extend(reader.segment_path(name) for name in segments)
    delete_all(fs, (*trash, *(reader.segment_path(name) for name in segments)))
    if failures:
        raise failures[0]
    return tuple(str(path.relative_to(reader.root)) for path in gone)
