"""What can go wrong in a refit, as exceptions.

Every class is a `RefitError`, so that a training loop catches the family in one clause. Rule kept
here: an error says which side, rank or setting it is about, and survives a Ray call.
"""

from collections.abc import Sequence
from typing import TypeVar

from ray.exceptions import RayActorError
from returns.pipeline import is_successful
from returns.result import Result

from rollsync.pure.refit import RefitErrorValue, describe
from rollsync.pure.refit.blame import HowEnded, StepEnd
from rollsync.shell.actor_deaths import reason_of_death
from rollsync.shell.errors import RollsyncError

_T = TypeVar("_T")


class RefitError(RollsyncError, RuntimeError):
    """A weight synchronization, or something it depends on, failed."""


class RefitConfigurationError(RefitError, ValueError):
    """The checkpoint-engine configuration, or what the workers answered, cannot be used.

    Args:
        error: the value that pure refused it with, when it was pure's decision.
    """

    def __init__(self, message: str, *, remedy: str = "", error: object = None) -> None:
        super().__init__(message, remedy=remedy)
        self.error = error


class WeightTransferFailed(RefitError):
    """A sync did not bring every generation engine to the same weight version.

    Those that did not load a whole one refuse to generate; the others serve the one they loaded.

    Args:
        backend: the checkpoint engine's name.
    """

    def __init__(self, message: str, *, backend: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.backend = backend


class UnsupportedVllm(RefitError):
    """The installed vLLM, or its loader of this model, is not one that rollsync was written for."""


class EngineStepFailed(RefitError):
    """A step of the checkpoint engine's life cycle failed on ranks of a generation engine.

    Args:
        end: how it ended on the rank that says most of the cause.
    """

    def __init__(self, message: str, *, end: StepEnd, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.end = end

    @property
    def echo(self) -> bool:
        """Whether every rank that failed only heard of a failure elsewhere."""
        return self.end.how is HowEnded.HEARD


class WorkerUnresponsive(RefitError):
    """Workers had not ended their part of a step when they were not waited for any longer.

    Args:
        workers: who is silent, as `policy worker 0` or `engine 1`.
        how: what was waited for, and how long.
        setting: what to raise where it is only slow; empty when there is no such thing.
    """

    def __init__(self, workers: Sequence[str], how: str, *, setting: str = "") -> None:
        does, its = (
            ("does", "its process is") if len(workers) == 1 else ("do", "their processes are")
        )
        slow = f"; raise {setting} if it is only slow" if setting else ""
        super().__init__(
            f"{' and '.join(workers)} {does} not answer: {how}",
            remedy=f"see whether {its} stopped or stuck, and end it{slow}",
        )
        self.workers = tuple(workers)
        self.how = how
        self.setting = setting


class WorkerGone(RefitError, RayActorError):
    """The process of a policy worker or an engine is gone, or does not answer to Ray.

    It is Ray's kind of error too, for those who tell deaths by that; its cause is Ray's own.

    Args:
        workers: who is gone, as `policy worker 0` or `engine 1`.
        death: what Ray raised for one of them.
    """

    def __init__(self, workers: Sequence[str], death: RayActorError) -> None:
        gone = f"{' and '.join(workers)} {'is' if len(workers) == 1 else 'are'} gone"
        super().__init__(
            f"{gone}: {reason_of_death(death)}",
            remedy="see Ray's log of it; give the actors that live, and new ones for those that do"
            " not, to a new group and synchronizer, and call its `reconnect()`",
        )
        self.workers = tuple(workers)
        self.death = death
        self.actor_id = death.actor_id
        self.error_msg = self.message
        self._actor_init_failed = death.actor_init_failed
        self._preempted = death.preempted
        self.__cause__ = death


class EngineNotServing(RefitError):
    """An engine refused to generate, because its weights are not those of one whole sync, or a sync
    is stuck in it.

    Args:
        state: the engine's life-cycle state, by name.
    """

    def __init__(self, message: str, *, state: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.state = state


class EngineOutdated(RefitError):
    """An engine refused to generate, because it serves other weights than the request wants.

    Args:
        serving: the weight version it serves.
        wanted: the weight version that the request has to be answered with.
    """

    def __init__(self, *, serving: int, wanted: int) -> None:
        super().__init__(
            f"the engine serves weight version {serving}, and the request wants {wanted}",
            remedy="synchronize the weights, or ask for the version that is served",
        )
        self.serving = serving
        self.wanted = wanted


class WeightMismatch(RefitError):
    """A weight that arrived is not the one that the policy declared.

    Args:
        tensor: its name.
    """

    def __init__(self, message: str, *, tensor: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.tensor = tensor


def name_of_engine(place: int, ranks_per_engine: int) -> str:
    """An engine, and the rollout workers that it consists of."""
    first = place * ranks_per_engine
    if ranks_per_engine == 1:
        return f"engine {place} (rollout worker {first})"
    return f"engine {place} (rollout workers {first} to {first + ranks_per_engine - 1})"


def accepted(result: Result[_T, RefitErrorValue]) -> _T:
    """What pure answered.

    Raises:
        RefitConfigurationError: it refused; the value is attached.
    """
    if not is_successful(result):
        error = result.failure()
        raise RefitConfigurationError(describe(error), error=error)
    return result.unwrap()
