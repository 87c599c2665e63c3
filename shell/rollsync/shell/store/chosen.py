"""What a run resumes from, as the restore sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from msgspec import Struct

from rollsync.pure.snapshot.manifest import BundleFacts
from rollsync.pure.snapshot.selection import RefusedBundle


class FoundBundle(Protocol):
    """A complete, verified bundle to resume from."""

    @property
    def path(self) -> Path:
        """Its directory."""
        ...

    @property
    def facts(self) -> BundleFacts:
        """What its manifest says."""
        ...

    @property
    def trainer_path(self) -> Path | None:
        """The trainer checkpoint of the same step; None at step 0: the weights are the initial
        ones."""
        ...

    def read(self, name: str) -> bytes:
        """A file of the bundle.

        Raises:
            RollsyncError: the bundle has no such file, or it is not what the manifest says.
        """
        ...

    def read_segment(self, name: str) -> bytes:
        """A segment that the bundle lists, of rows or of the state.

        Raises:
            RollsyncError: it is not there, or is damaged.
        """
        ...


class Chosen(Struct, frozen=True, kw_only=True):
    """What a run resumes from."""

    bundle: FoundBundle | None
    """None: the run is fresh."""
    refused: tuple[RefusedBundle, ...]
    """Newer ones that were passed over, newest first."""
