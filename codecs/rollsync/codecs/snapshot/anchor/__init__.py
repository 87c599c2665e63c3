"""`snapshot.anchor`: which run a run directory belongs to."""

from __future__ import annotations

from typing import Final

from returns.result import Failure, Result, Success

from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.snapshot.anchor import v1
from rollsync.pure.snapshot.lineage import BootstrapAnchor, fingerprint_of

_RULE = "fingerprint is the digest of settings"


def to_wire(anchor: BootstrapAnchor) -> v1.Anchor:
    """The anchor as it is.

    Raises:
        ValueError: The fingerprint is not that of the settings.
    """
    if anchor.fingerprint != fingerprint_of(anchor.settings):
        raise ValueError(_RULE)
    return v1.Anchor(
        schema_version=anchor.schema_version,
        settings=dict(anchor.settings),
        fingerprint=anchor.fingerprint,
    )


def from_wire(wire: v1.Anchor) -> Result[BootstrapAnchor, Refusal]:
    """The anchor, if its fingerprint is right."""
    if wire.fingerprint != fingerprint_of(wire.settings):
        return Failure(_RULE)
    return Success(
        BootstrapAnchor(
            schema_version=wire.schema_version,
            settings=wire.settings,
            fingerprint=wire.fingerprint,
        )
    )


SNAPSHOT_ANCHOR: Final = kind(
    "snapshot.anchor",
    domain=BootstrapAnchor,
    history=first(v1.Anchor),
    to_wire=to_wire,
    from_wire=from_wire,
)
