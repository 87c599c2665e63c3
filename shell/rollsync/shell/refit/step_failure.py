"""How a step of a sync that failed ended on every worker, and which of the failures is the cause.

Rule kept here: a failure is judged when no worker is busy with the step any more, or when those
that are have been waited for long enough. Ray raises at the first one, which may be only the echo
of the one that matters, and until the last has ended none of them may be given anything else to do.
One that failed before it met the others is still expected by them, as its process lives: its
checkpoint engine is finalized, and then they notice.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from rollsync.pure.refit.blame import HowEnded, StepEnd, place_of_cause, to_blame
from rollsync.pure.refit.routes import PolicyWorker, RolloutWorker
from rollsync.shell.refit.errors import WorkerGone, WorkerUnresponsive, name_of_engine
from rollsync.shell.refit.step_answers import end_by

NOTICED_S: Final = 2.0
"""How long the failure of one worker may take to reach those that it was at work with."""


@dataclass(frozen=True)
class WorkerAnswers:
    """What every worker answered to a step that failed: a value, or the exception that it raised.

    Attributes:
        policy: of the policy's workers, in their order.
        engines: of the generation's engines, in their order.
        ranks_per_engine: how many rollout workers each engine has.
    """

    policy: tuple[object, ...]
    engines: tuple[object, ...]
    ranks_per_engine: int = 1

    @property
    def to_blame(self) -> frozenset[int]:
        """Because of which workers the step failed: places among all, policy first."""
        return to_blame(self._ends(), self._ranks())

    @property
    def engines_to_blame(self) -> frozenset[int]:
        """Because of which engines the step failed, by their place among the engines."""
        first = len(self.policy)
        return frozenset(place - first for place in self.to_blame if place >= first)

    @property
    def silent(self) -> frozenset[int]:
        """Workers that are busy with the step still: places among all, policy first."""
        ends = enumerate(self._ends())
        return frozenset(place for place, end in ends if end.how is HowEnded.SILENT)

    @property
    def failed_alive(self) -> tuple[Exception, ...]:
        """What was raised on those whose process has not ended, policy first."""
        answers = (*self.policy, *self.engines)
        return tuple(answer for answer in answers if _lives_and_failed(answer))

    def cause(self, first: Exception) -> Exception:
        """The error that the others follow from, with notes of those.

        Args:
            first: what was raised first; answered when nothing is known that is better.
        """
        answers = (*self.policy, *self.engines)
        best = answers[place_of_cause(self._ends())]
        cause = best if isinstance(best, Exception) else first
        if isinstance(cause, RayActorError):
            cause = WorkerGone(self._gone() or ("a worker",), cause)
        for error in answers:
            if isinstance(error, Exception) and type(error) not in (type(cause), type(best)):
                # The last line; the lines before are the remote stack.
                cause.add_note(f"another worker: {str(error).strip().splitlines()[-1:]}")
        return cause

    def _gone(self) -> tuple[str, ...]:
        """Whose process is gone, with the ranks that an engine has."""
        size = self.ranks_per_engine
        policy = [f"policy worker {rank}" for rank in range(len(self.policy))]
        engines = [name_of_engine(place, size) for place in range(len(self.engines))]
        named = zip(policy + engines, (*self.policy, *self.engines), strict=True)
        return tuple(name for name, answer in named if isinstance(answer, RayActorError))

    def _ends(self) -> list[StepEnd]:
        return [_end_of(answer) for answer in (*self.policy, *self.engines)]

    def _ranks(self) -> list[list[str]]:
        policy = [[str(PolicyWorker(rank))] for rank in range(len(self.policy))]
        size = self.ranks_per_engine
        engines = [
            [str(RolloutWorker(rank)) for rank in range(engine * size, (engine + 1) * size)]
            for engine in range(len(self.engines))
        ]
        return policy + engines


def settle(
    policy_refs: Sequence[object],
    generation_refs: Sequence[object],
    *,
    ranks_per_engine: int,
    timeout_s: float,
    finalize_failed: Callable[[list[int]], None] | None,
) -> WorkerAnswers:
    """Waits until the step has ended on every worker, or for `timeout_s`.

    Args:
        policy_refs: what will be answered by the policy's workers.
        generation_refs: what will be answered by the engines.
        ranks_per_engine: how many rollout workers each engine has.
        timeout_s: how long to wait.
        finalize_failed: called with places in both lists, one after the other, when others still
            wait: of workers that live and have failed, each once. It finalizes their checkpoint
            engines, which makes the others notice. None when there is nothing to finalize.
    """
    answers = [*policy_refs, *generation_refs]
    refs = [ref for ref in answers if isinstance(ref, ObjectRef)]
    until_s = time.monotonic() + timeout_s
    finalized: set[int] = set()
    while refs and (left_s := until_s - time.monotonic()) > 0:
        _, busy = ray.wait(refs, num_returns=len(refs), timeout=min(NOTICED_S, left_s))
        if not busy:
            break
        failed = [
            place
            for place, ref in enumerate(answers)
            if ref not in busy and place not in finalized and _lives_and_failed(_answer_of(ref))
        ]
        if failed and finalize_failed is not None:
            finalized.update(failed)
            finalize_failed(failed)
    return WorkerAnswers(
        policy=tuple(
            _answer_of(ref, f"policy worker {rank}", timeout_s)
            for rank, ref in enumerate(policy_refs)
        ),
        engines=tuple(
            _answer_of(ref, f"engine {place}", timeout_s)
            for place, ref in enumerate(generation_refs)
        ),
        ranks_per_engine=ranks_per_engine,
    )


def _end_of(answer: object) -> StepEnd:
    error = answer.cause if isinstance(answer, RayTaskError) else answer
    if isinstance(error, WorkerUnresponsive):
        return StepEnd(HowEnded.SILENT)
    if isinstance(error, RayActorError):
        return StepEnd(HowEnded.GONE)
    if isinstance(error, Exception):
        return end_by(error)
    # With False an engine says that it did not load the weights.
    return StepEnd(HowEnded.FAILED if error is False else HowEnded.DONE)


def _lives_and_failed(answer: object) -> TypeGuard[Exception]:
    """Whether a worker's process is there after its failure: the end of one is noticed anyway."""
    return isinstance(answer, Exception) and not isinstance(answer, RayActorError)


def _answer_of(ref: object, worker: str = "", waited_s: float = 0.0) -> object:
    """What a worker answered; of one that is still busy, that it is."""
    if not isinstance(ref, ObjectRef):
        return None
    if not ray.wait([ref], timeout=0)[0]:
        return WorkerUnresponsive(
            f"{worker} does not answer: it was still busy {waited_s:g} s after another worker of"
            " the same step had failed",
            worker=worker,
            remedy="see whether its process is stopped or stuck, and end it",
        )
    try:
        return ray.get(ref)
    except Exception as error:
        return error
