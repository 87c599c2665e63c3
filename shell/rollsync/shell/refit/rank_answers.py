"""What a rank of an engine answers to a step of the checkpoint engine's life cycle.

Rule kept here: a failure is a value until all ranks have answered, and is raised then, once.
"""

from collections.abc import Iterable

import msgspec

from rollsync.pure.refit.blame import CAUSES_FIRST, HowEnded, StepEnd
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost, TransferTimeout
from rollsync.shell.refit.errors import EngineStepFailed


class RankDone(msgspec.Struct, frozen=True, tag="done"):
    """The step ended well, with a plain value."""

    value: object


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The step failed.

    Attributes:
        rank: the rank in its engine.
        message: the error's kind and words.
        end: whether it failed by itself, waited in vain, or only heard of a failure elsewhere.
    """

    rank: int
    message: str
    end: StepEnd


RankAnswer = RankDone | RankFailed


def rank_failed(rank: int, error: Exception) -> RankFailed:
    """The answer of a rank on which a step raised `error`."""
    return RankFailed(rank, f"{type(error).__name__}: {error}", end_by(error))


def end_by(error: Exception) -> StepEnd:
    """How a step ended on a worker that lives and raised `error`."""
    match error:
        case EngineStepFailed():
            return error.end
        case PeerFailed() | PeerLost():
            return StepEnd(HowEnded.HEARD)
        case TransferTimeout():
            return StepEnd(HowEnded.TIMED_OUT, (error.waited_for,) if error.waited_for else ())
        case _:
            return StepEnd(HowEnded.FAILED)


def values_of(step: str, answers: Iterable[object]) -> list[object]:
    """What the ranks answered, from the plain form of their `RankAnswer`s.

    Raises:
        EngineStepFailed: when a rank failed; it tells the first cause before echoes of it.
    """
    told = msgspec.convert(list(answers), list[RankAnswer])
    failed = [answer for answer in told if isinstance(answer, RankFailed)]
    if failed:
        failed.sort(key=lambda answer: CAUSES_FIRST.index(answer.end.how))
        ranks = "; ".join(f"rank {answer.rank}: {answer.message}" for answer in failed)
        how = failed[0].end.how
        waited_for = (name for each in failed for name in each.end.waited_for)
        raise EngineStepFailed(
            f"{step} failed on {ranks}", end=StepEnd(how, tuple(dict.fromkeys(waited_for)))
        )
    return [answer.value for answer in told if isinstance(answer, RankDone)]
