"""Waits for a step of a sync to end on the workers of both sides, and no longer than it may take.

Rule kept here: a failure is judged when no worker is busy with the step any more, or when those
that are have been waited for long enough. Ray raises at the first one, which may be only the echo
of the one that matters, and until the last has ended none of them may be given anything else to do.
One that failed before it met the others is still expected by them, as its process lives: its
checkpoint engine is finalized, and then they notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import ray
from ray import ObjectRef

from rollsync.pure.refit.patience import REFIT_TIMEOUT, Limit, limit_of
from rollsync.pure.refit.steps import Step
from rollsync.shell.refit.errors import WorkerUnresponsive
from rollsync.shell.refit.remote_waits import answer_of, wait_for_all
from rollsync.shell.refit.step_failure import WorkerAnswers, lives_and_failed

NOTICED_S: Final = 2.0
"""How long the failure of one worker may take to reach those that it was at work with."""


@dataclass(frozen=True, kw_only=True)
class RunningStep:
    """A step that the workers of both sides have been asked for.

    Attributes:
        step: which one.
        policy: what will be answered by the policy's workers.
        engines: what will be answered by the engines.
        ranks_per_engine: how many rollout workers each engine has.
        refit_timeout_s: longest wait for the other end of a stream, and for the others when the
            step has failed on one.
        step_timeout_s: longest wait for a step that moves no weights.
    """

    step: Step
    policy: Sequence[ObjectRef[object]]
    engines: Sequence[ObjectRef[object]]
    ranks_per_engine: int
    refit_timeout_s: float
    step_timeout_s: float

    def wait(self) -> WorkerAnswers | None:
        """Wait until it has ended on all workers, or has failed on one. When it takes longer than
        it may: how it has ended by then. There may be nobody who is silent still."""
        overdue = self._overdue()
        if overdue is None:
            return None
        how = f"it has not ended {self.step} within {overdue.waited_s:g} s{overdue.since}"
        return self._answered(how, overdue.setting)

    def wait_out(self, finalize_failed: Callable[[list[int]], None] | None) -> WorkerAnswers:
        """Wait, when it has failed on a worker, until it has ended on all, or for long enough.

        Args:
            finalize_failed: called with places in both lists, one after the other, when others
                still wait: of workers that live and have failed, each once. It finalizes their
                checkpoint engines, which makes the others notice. None when there is nothing to
                finalize.
        """
        self._settle(finalize_failed)
        return self._answered(
            f"it was still busy with {self.step} {self.refit_timeout_s:g} s after another worker"
            " had failed at it",
            REFIT_TIMEOUT,
        )

    def _overdue(self) -> Limit | None:
        """Wait until it has ended on all, or has failed on one; the limit, if that is late."""
        own, began_s = set(_refs_of(self.policy)), time.monotonic()
        side_done_s: float | None = None
        limit: Limit | None = None

        def until_s(busy: Sequence[ObjectRef[object]]) -> float:
            nonlocal limit, side_done_s
            if side_done_s is None and len({ref in own for ref in busy}) == 1:
                side_done_s = time.monotonic()
            limit = limit_of(
                self.step,
                began_s=began_s,
                side_done_s=side_done_s,
                refit_timeout_s=self.refit_timeout_s,
                step_timeout_s=self.step_timeout_s,
            )
            return limit.until_s

        busy = wait_for_all(self._refs(), until_s)
        return limit if busy and time.monotonic() >= until_s(busy) else None

    def _settle(self, finalize_failed: Callable[[list[int]], None] | None) -> None:
        """Wait until a step that has failed has ended on every worker, or for long enough."""
        answers: list[object] = [*self.policy, *self.engines]
        refs = self._refs()
        until_s = time.monotonic() + self.refit_timeout_s
        finalized: set[int] = set()
        while refs and (left_s := until_s - time.monotonic()) > 0:
            _, busy = ray.wait(refs, num_returns=len(refs), timeout=min(NOTICED_S, left_s))
            if not busy:
                break
            failed = [
                place
                for place, ref in enumerate(answers)
                if isinstance(ref, ObjectRef)
                and ref not in busy
                and place not in finalized
                and lives_and_failed(answer_of(ref))
            ]
            if failed and finalize_failed is not None:
                finalized.update(failed)
                finalize_failed(failed)

    def _answered(self, silent: str, setting: str) -> WorkerAnswers:
        """How it has ended on every worker by now; of one that is silent, in these words."""

        def answer(ref: object, worker: str) -> object:
            if isinstance(ref, ObjectRef) and not ray.wait([ref], timeout=0)[0]:
                return WorkerUnresponsive((worker,), silent, setting=setting)
            return answer_of(ref) if isinstance(ref, ObjectRef) else None

        return WorkerAnswers(
            policy=tuple(answer(ref, f"policy worker {i}") for i, ref in enumerate(self.policy)),
            engines=tuple(answer(ref, f"engine {i}") for i, ref in enumerate(self.engines)),
            ranks_per_engine=self.ranks_per_engine,
        )

    def _refs(self) -> list[ObjectRef[object]]:
        return _refs_of([*self.policy, *self.engines])


def _refs_of(answers: Sequence[object]) -> list[ObjectRef[object]]:
    """Those that have to be waited for. What else a group gives, as one that is no Ray group may,
    has ended."""
    return [ref for ref in answers if isinstance(ref, ObjectRef)]
