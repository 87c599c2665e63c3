"""Version 1 of the bootstrap anchor."""

from __future__ import annotations

from rollsync.codecs.canonical import Natural, Sha256Hex, Wire


class Anchor(Wire, frozen=True, kw_only=True):
    """A run's identity."""

    schema_version: Natural
    settings: dict[str, str]
    fingerprint: Sha256Hex
