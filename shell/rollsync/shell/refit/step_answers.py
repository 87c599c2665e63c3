"""What a rank of an engine answers to a step of the checkpoint engine's life cycle.

Rule kept here: a failure is a value until all ranks have answered, and is raised then, once.
"""

from collections.abc import Iterable

import msgspec

from rollsync.shell.refit.errors import EngineStepFailed


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    """The step ended well, with a plain value."""

    value: object


class StepFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The step failed.

    Attributes:
        rank: the rank in its engine.
        message: the error's kind and words.
        echo: whether the rank only heard of a failure elsewhere.
    """

    rank: int
    message: str
    echo: bool


StepAnswer = StepDone | StepFailed


def values_of(step: str, answers: Iterable[object]) -> list[object]:
    """What the ranks answered, from the plain form of their `StepAnswer`s.

    Raises:
        EngineStepFailed: when a rank failed; it tells the first cause before echoes of it.
    """
    told = msgspec.convert(list(answers), list[StepAnswer])
    failed = [answer for answer in told if isinstance(answer, StepFailed)]
    if failed:
        failed.sort(key=lambda answer: answer.echo)
        ranks = "; ".join(f"rank {answer.rank}: {answer.message}" for answer in failed)
        raise EngineStepFailed(f"{step} failed on {ranks}", echo=failed[0].echo)
    return [answer.value for answer in told if isinstance(answer, StepDone)]
