"""`snapshot.manifest`: what a bundle in a run directory holds, file by file."""

from __future__ import annotations

from typing import Final

import msgspec
from returns.result import Failure, Result, Success

from rollsync.codecs.canonical import strictly_increasing
from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.snapshot.manifest import v1, v2
from rollsync.pure.snapshot.manifest import RolloutSnapshotManifest

_ORDER = "files are sorted by name, each once"


def to_wire(manifest: RolloutSnapshotManifest) -> v2.Manifest:
    """The manifest as it is.

    Raises:
        ValueError: Its files are out of order; it would not be read again.
    """
    if not _in_order(manifest):
        raise ValueError(_ORDER)
    return msgspec.convert(manifest, v2.Manifest, from_attributes=True)


def from_wire(wire: v2.Manifest) -> Result[RolloutSnapshotManifest, Refusal]:
    """The manifest. Whether its names are legal is for who opens them to ask (`unsafe_name`)."""
    manifest = msgspec.convert(wire, RolloutSnapshotManifest, from_attributes=True)
    return Success(manifest) if _in_order(manifest) else Failure(_ORDER)


def _in_order(manifest: RolloutSnapshotManifest) -> bool:
    return strictly_increasing([file.name for file in manifest.files])


SNAPSHOT_MANIFEST: Final = kind(
    "snapshot.manifest",
    domain=RolloutSnapshotManifest,
    history=first(v1.Manifest).then(v2.Manifest, v2.from_v1),
    to_wire=to_wire,
    from_wire=from_wire,
)
