"""Saves a snapshot every interval, and says when the last one before a deadline is due.

Rule kept here: what another attempt cannot mend (an invariant error) ends the run at once; an I/O
error or a timeout is tolerated as long as not too many come in a row. When to save is decided by
`pure`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollsync.pure.config import CheckpointingConfig
from rollsync.pure.rollout.cadence import next_save
from rollsync.pure.rollout.checkpointing import (
    RolloutCheckpointAttemptReason,
    RolloutCheckpointOutcome,
    RolloutCheckpointSaveResult,
)
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.errors import WorkersLost
from rollsync.shell.rollout.snapshots import RolloutSnapshotter

RETRY_S = 0.05
"""Between attempts: an optimizer commit takes about as long."""

PASSES_SOON = (
    RolloutCheckpointAttemptReason.OPTIMIZER_COMMIT_IN_PROGRESS,
    RolloutCheckpointAttemptReason.TRAINER_STATE_CHANGED,
)
"""Reasons to skip that are gone in a moment: waiting a whole interval could miss them for ever."""

LOOK_AGAIN_S = 5.0
"""How often it is decided anew when to save: how long the last save needs shows as steps end."""


class RolloutSaveError(RollsyncError):
    """Saving failed so that the run must not go on."""

    def __init__(self, result: RolloutCheckpointSaveResult, message: str, *, remedy: str) -> None:
        super().__init__(message, remedy=remedy)
        self.result = result


def unsavable(result: RolloutCheckpointSaveResult, cause: BaseException | None) -> RolloutSaveError:
    """The error of a run whose state cannot be saved, however often it is tried."""
    error = RolloutSaveError(
        result,
        f"the run may not go on, saving it failed for good: {cause}",
        remedy="mend what the message says, and resume from the newest snapshot",
    )
    error.__cause__ = cause
    return error


class SnapshotPump:
    """The task that makes a run's periodic snapshots.

    Args:
        snapshotter: does the saving.
        config: when, and how much may fail.
        run_started_s: reading of the event loop's clock from which the deadline counts.
        longest_step_s: how long the longest training step so far took.
        deadline_margin_s: the last snapshot starts at least this long before the deadline.
    """

    def __init__(
        self,
        snapshotter: RolloutSnapshotter,
        config: CheckpointingConfig,
        *,
        run_started_s: float,
        longest_step_s: Callable[[], float],
        deadline_margin_s: float = 30.0,
    ) -> None:
        self._snapshotter = snapshotter
        self._config = config
        self._deadline_margin_s = deadline_margin_s
        self._run_started_s = run_started_s
        self._longest_step_s = longest_step_s
        self._failures = 0
        self.last_is_due = asyncio.Event()
        """Set when it is time for the last snapshot before the deadline: the run is to end."""

    async def run(self, stop: asyncio.Event) -> None:
        """Save until `stop` is set or the last snapshot before the deadline is due.

        Raises:
            RolloutSaveError: an invariant error, or too many failures in a row.
            WorkersLost: what was to be saved is gone.
        """
        tried_s = self._now_s()
        while not stop.is_set():
            now_s = self._now_s()
            upcoming = next_save(
                self._config,
                now_s=now_s,
                tried_s=tried_s,
                longest_save_s=self._snapshotter.longest_save_s,
                longest_step_s=self._longest_step_s(),
                margin_s=self._deadline_margin_s,
            )
            wait_s = upcoming.at_s - now_s
            if await _is_set_within(stop, min(wait_s, LOOK_AGAIN_S)):
                return
            if wait_s > LOOK_AGAIN_S:
                continue
            if upcoming.is_last:
                self.last_is_due.set()
                return
            await self._save(stop)
            tried_s = self._now_s()

    async def _save(self, stop: asyncio.Event) -> None:
        """Save now, or as soon as a step that is being committed lets it."""
        while True:
            result = await self._snapshotter.save_rollout_snapshot()
            self._judge(result)
            if result.reason not in PASSES_SOON or await _is_set_within(stop, RETRY_S):
                return

    def _judge(self, result: RolloutCheckpointSaveResult) -> None:
        if result.reason.outcome is not RolloutCheckpointOutcome.FAILED:
            if result.saved:
                self._failures = 0
            return
        cause = self._snapshotter.last_error
        if isinstance(cause, WorkersLost):
            raise cause
        if result.reason is RolloutCheckpointAttemptReason.INVARIANT_ERROR:
            raise unsavable(result, cause)
        self._failures += 1
        if self._failures > self._config.max_consecutive_failures:
            raise RolloutSaveError(
                result,
                f"{self._failures} snapshots in a row failed, the last with {result.reason}: "
                f"{cause}",
                remedy="make room or repair the file system, or raise the failure limit",
            ) from cause

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._run_started_s


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
