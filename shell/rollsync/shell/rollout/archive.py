"""What saving and restoring ask of the place where snapshots lie.

All calls block (they write, fsync and rename), so the callers run them in a thread, one at a time.
`rollsync.shell.store` has the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from rollsync.pure.rollout.checkpointing import CheckpointKind

STATE_FILE = "rollout_state.bin"
"""The state's file in a bundle: one envelope of kind `rollout.state`."""
ENVIRONMENT_DIRECTORY = "environment"
"""Where an environment's files are in a bundle."""


class BundleFacts(Struct, frozen=True, kw_only=True):
    """What a bundle's manifest says beside its list of files."""

    kind: CheckpointKind
    base_train_step: int
    trainer_version: int
    current_epoch: int
    sampler_dispatch_index: int
    mutation_version: int
    rolled_back_train_group_count: int
    environment_fingerprint: str | None
    segments: tuple[str, ...]
    """Row segments, oldest first: of a row that is in several, the last counts."""


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
        """Make a row segment durable; its name. Equal data have equal names, written once."""
        ...

    def begin(self, kind: CheckpointKind, train_steps: int) -> BundleDraft:
        """Begin a bundle under the anchor of that step, or a trainer checkpoint of it."""
        ...

    def prune(self) -> Sequence[str]:
        """Retire what retention no longer keeps; the names of what went."""
        ...


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
        """A row segment that the bundle lists.

        Raises:
            RollsyncError: it is not there, or is damaged.
        """
        ...


class RefusedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that was passed over."""

    path: str
    why: str


class Chosen(Struct, frozen=True, kw_only=True):
    """What a run resumes from."""

    bundle: FoundBundle | None
    """None: the run is fresh."""
    refused: tuple[RefusedBundle, ...]
    """Newer ones that were passed over, newest first."""


class ResumeArchive(Protocol):
    """Run directory of a run that may be resumed. Nothing of it writes."""

    def choose(self) -> Chosen:
        """The newest bundle that is complete and verifies.

        Raises:
            RollsyncError: there are bundles, and none can be taken; the message has every reason.
        """
        ...
