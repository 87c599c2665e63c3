"""The last save of a run that is to end: it was asked to stop, or its deadline comes.

Rules kept here: no step is begun any more, and one that ends while the save is written is saved
too, so that nothing that was trained is trained again; a step that has no checkpoint to put a
snapshot under gets one, as soon as the step that is being trained has ended, for which there is a
deadline; before a deadline to save by, what fails is tried again as long as there is time; and what
could not be saved is said with its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct

from rollsync.pure.rollout.checkpointing import (
    RolloutCheckpointAttemptReason,
    RolloutCheckpointOutcome,
    RolloutCheckpointSaveResult,
)
from rollsync.shell.rollout.snapshot_pump import PASSES_SOON, RETRY_S, unsavable
from rollsync.shell.rollout.snapshots import RolloutSnapshotter

Reason = RolloutCheckpointAttemptReason


class LastSaveEnd(Struct, frozen=True, kw_only=True):
    """How the last save ended."""

    saved: bool
    """Whether all that the run had done is on disk."""
    how: str
    """In words, with the reason when it is not."""


async def save_last(
    snapshotter: RolloutSnapshotter,
    training: asyncio.Task[object],
    *,
    stop_after_step: Callable[[], None],
    train_steps: Callable[[], int],
    until_s: float | None,
    step_timeout_s: float,
) -> LastSaveEnd:
    """Save what the run has; how that ended.

    Args:
        training: the train pump. Where a checkpoint is missing, or a step has ended since the
            save, this waits for its end.
        stop_after_step: has it end after the step that it is in, with a checkpoint.
        train_steps: how many steps are trained by now.
        until_s: reading of the event loop's clock from which on nothing is begun any more. None:
            there is no deadline, and a save that fails is not repeated.
        step_timeout_s: without a deadline, longest wait for the end of the train pump: whoever is
            at the step may be halted.

    Raises:
        RolloutSaveError: the state contradicts itself; no attempt can save it.
    """
    stop_after_step()
    while True:
        trained = train_steps()
        result = await snapshotter.save_rollout_snapshot(force=True)
        left_s = None if until_s is None else until_s - asyncio.get_running_loop().time()
        if result.reason is Reason.INVARIANT_ERROR:
            raise unsavable(result, snapshotter.last_error)
        end = _end(result, snapshotter.last_error, step_since=train_steps() != trained)
        if end.saved or (left_s is not None and left_s <= 0):
            return end
        if result.saved or result.reason is Reason.MISSING_TRAINER_ANCHOR:
            if until_s is None:
                until_s = asyncio.get_running_loop().time() + step_timeout_s
                left_s = step_timeout_s
            await asyncio.wait((training,), timeout=left_s)
            if training.done():
                training.result()
                return LastSaveEnd(saved=True, how="the last step has its checkpoint")
            # One more attempt: it waits for the checkpoint that may be on its way.
        elif _may_pass(result, has_time=left_s is not None):
            await asyncio.sleep(RETRY_S if left_s is None else min(RETRY_S, left_s))
        else:
            return end


def _may_pass(result: RolloutCheckpointSaveResult, *, has_time: bool) -> bool:
    failed = result.reason.outcome is RolloutCheckpointOutcome.FAILED
    return result.reason in PASSES_SOON or (failed and has_time)


def _end(
    result: RolloutCheckpointSaveResult, cause: BaseException | None, *, step_since: bool
) -> LastSaveEnd:
    words = f"last snapshot: {result.reason}"
    if result.saved and step_since:
        return LastSaveEnd(saved=False, how=f"{words}, before the end of another step")
    return LastSaveEnd(saved=result.saved, how=_in_words(words, result, cause))


def _in_words(words: str, result: RolloutCheckpointSaveResult, cause: BaseException | None) -> str:
    if result.reason is Reason.MISSING_TRAINER_ANCHOR:
        return f"{words}: the newest step has no checkpoint, and the one under way did not end"
    if result.reason.outcome is RolloutCheckpointOutcome.FAILED:
        return f"{words}: {cause}"
    return words
