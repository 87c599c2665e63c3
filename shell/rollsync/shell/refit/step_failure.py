"""How a step of a sync that failed ended on every worker, and which of the failures is the cause.

Rule kept here: what is raised is the cause, by the name of the worker, with the rest as notes;
whose fault it is follows from how it ended on all of them (`rollsync.pure.refit.blame`).
"""

from dataclasses import dataclass
from typing import TypeGuard

from ray.exceptions import RayActorError, RayTaskError

from rollsync.pure.refit.blame import HowEnded, StepEnd, place_of_cause, to_blame
from rollsync.pure.refit.routes import PolicyWorker, RolloutWorker
from rollsync.shell.refit.errors import WorkerGone, WorkerUnresponsive, name_of_engine
from rollsync.shell.refit.rank_answers import end_by


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
        return tuple(answer for answer in answers if lives_and_failed(answer))

    @property
    def unresponsive(self) -> WorkerUnresponsive | None:
        """All that are silent, in one error; None when nobody is."""
        silent = [a for a in (*self.policy, *self.engines) if isinstance(a, WorkerUnresponsive)]
        if len(silent) < 2:
            return silent[0] if silent else None
        names = tuple(name for each in silent for name in each.workers)
        return WorkerUnresponsive(names, silent[0].how, setting=silent[0].setting)

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
        elif isinstance(cause, WorkerUnresponsive):
            cause = self.unresponsive or cause
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


def lives_and_failed(answer: object) -> TypeGuard[Exception]:
    """Whether a worker's process is there after its failure: the end of one is noticed anyway."""
    return isinstance(answer, Exception) and not isinstance(answer, RayActorError)
