"""What saving and restoring ask of an environment whose backend keeps part of a rollout.

The order of a snapshot::

    async with environment.snapshot(path) as part:        # paused, its part written to `path`
        async with barrier.checkpoint() as cut:
            ...                                            # the state is taken
            if part is not None:
                await part.check_against_cut(state)
        ...                                                # written and published
    # resumed

Rules of the protocol: a block that ends well resumes the backend and one that raises aborts, which
also resumes it; nothing of an aborted commit stays. When resuming fails, `EnvironmentResumeError`
says so, and the run must not admit new rollouts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

from rollsync.pure.rollout.episodes import EnvironmentEpisode
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.errors import RollsyncError


class EnvironmentSaveError(RollsyncError):
    """The backend could not be paused or its part not be written, or it contradicts the ledger."""


class EnvironmentResumeError(RollsyncError):
    """The backend did not resume after a snapshot: its rollouts are stuck."""


class EnvironmentRestoreError(RollsyncError):
    """The backend did not take its part of a snapshot back."""


class EnvironmentSnapshot(Protocol):
    """The backend's part of one snapshot, while the backend is paused."""

    @property
    def episodes(self) -> tuple[EnvironmentEpisode, ...]:
        """What the part holds."""
        ...

    async def check_against_cut(self, state: RolloutState) -> None:
        """Compare the part with the state that the cut took.

        Raises:
            EnvironmentSaveError: an episode is of no attempt that the ledger dispatched.
        """
        ...


class EnvironmentCheckpoint(Protocol):
    """Saves and restores what a backend keeps between turns."""

    @property
    def fingerprint(self) -> str | None:
        """Which backend this is, and with which rules: a part is restored only into an equal one.
        None for a backend that keeps nothing."""
        ...

    def snapshot(self, path: Path) -> AbstractAsyncContextManager[EnvironmentSnapshot | None]:
        """Pause, write the backend's part as files into the directory `path`; resume at the end.

        Raises:
            EnvironmentSaveError: pausing or writing failed; the backend runs on.
            EnvironmentResumeError: resuming failed.
        """
        ...

    async def restore(
        self, path: Path, continued: Mapping[EnvironmentEpisode, EnvironmentEpisode]
    ) -> tuple[EnvironmentEpisode, ...]:
        """Take episodes back from `path`: those that are keys, under the names that are values.

        Returns:
            The new names of the episodes that go on. Others have to begin again.

        Raises:
            EnvironmentRestoreError: the files are not what the backend wrote.
        """
        ...


class NoEnvironmentCheckpoint:
    """For a backend that keeps nothing between turns."""

    @property
    def fingerprint(self) -> str | None:
        """Always None."""
        return None

    @asynccontextmanager
    async def snapshot(self, path: Path) -> AsyncIterator[EnvironmentSnapshot | None]:
        """Pauses nothing and writes nothing."""
        yield None

    async def restore(
        self, path: Path, continued: Mapping[EnvironmentEpisode, EnvironmentEpisode]
    ) -> tuple[EnvironmentEpisode, ...]:
        """Continues nothing."""
        return ()
