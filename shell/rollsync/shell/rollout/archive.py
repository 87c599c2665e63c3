"""What saving and restoring ask of the place where snapshots lie.

All calls block (they write, fsync and rename), so the callers run them in a thread, one at a time.
`rollsync.shell.store` has the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.manifest import BundleFacts
from rollsync.pure.snapshot.selection import RefusedBundle
from rollsync.shell.store.chosen import Chosen, FoundBundle

__all__ = [
    "ENVIRONMENT_DIRECTORY",
    "STATE_FILE",
    "BundleDraft",
    "BundleFacts",
    "Chosen",
    "FoundBundle",
    "RefusedBundle",
    "ResumeArchive",
    "SnapshotArchive",
]

STATE_FILE = "rollout_state.bin"
"""The state's file in bundles of layout 1: one envelope of kind `rollout.state`. Since then the
state lies in segments."""
ENVIRONMENT_DIRECTORY = "environment"
"""Where an environment's files are in a bundle."""


class BundleDraft(Protocol):
    """A bundle that is being written and that no reader can see yet."""

    @property
    def path(self) -> Path:
        """Its directory. Files that are put here belong to the bundle."""
        ...

    def publish(self, facts: BundleFacts, files: Mapping[str, bytes]) -> Path:
        """Add `files`, make everything durable, and give the bundle its name, in this order.

        Returns:
            The bundle's directory under its final name.

        Raises:
            OSError: nothing was published.
        """
        ...

    def abandon(self) -> None:
        """Throw the draft away. Does nothing after `publish`."""
        ...


class SnapshotArchive(Protocol):
    """Run directory of one run."""

    def has_anchor(self, train_steps: int) -> bool:
        """Whether a resume from snapshots of this step would find weights. Step 0's anchor (the
        run's identity) is made if it is missing."""
        ...

    def put_segment(self, data: bytes) -> str:
        """Make a segment durable; its name. Equal data have equal names, written once."""
        ...

    def begin(self, kind: CheckpointKind, train_steps: int) -> BundleDraft:
        """Begin a bundle under the anchor of that step, or a trainer checkpoint of it."""
        ...

    def prune(self) -> Sequence[str]:
        """Retire what retention no longer keeps; the names of what went."""
        ...


class ResumeArchive(Protocol):
    """Run directory of a run that may be resumed. Nothing of it writes."""

    def choose(self) -> Chosen:
        """The newest bundle that is complete and verifies.

        Raises:
            RollsyncError: there are bundles, and none can be taken; the message has every reason.
        """
        ...
