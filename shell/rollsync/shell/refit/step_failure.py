"""How a step of a sync that failed ended on every worker, and which of the failures is the cause.

Rule kept here: a failure is judged when no worker is busy with the step any more. Ray raises at the
first one, which may be only the echo of the one that matters, and until the last has ended none of
them may be given anything else to do. One that failed before it met the others is still expected
by them, as its process lives: it is let go, and then they notice.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError

from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost
from rollsync.shell.refit.errors import EngineStepFailed

ECHO_S: Final = 2.0
"""How long the failure of one worker may take to reach those that it was at work with."""


@dataclass(frozen=True)
class StepFailure:
    """What every worker of a failed step answered: a value, or the exception that it raised.

    Attributes:
        policy: of the policy's workers, in their order.
        engines: of the generation's engines, in their order.
    """

    policy: tuple[object, ...]
    engines: tuple[object, ...]

    def cause(self, first: Exception) -> Exception:
        """The error that the others follow from, with notes of those.

        Args:
            first: what was raised first; answered when nothing is known that is better.
        """
        answers = (*self.policy, *self.engines)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        cause = next((error for error in errors if not is_echo(error)), first)
        for error in errors:
            if type(error) is not type(cause):
                # The last line; the lines before are the remote stack.
                cause.add_note(f"another worker: {str(error).strip().splitlines()[-1:]}")
        return cause


def settle(
    policy_refs: Sequence[object],
    generation_refs: Sequence[object],
    *,
    timeout_s: float,
    let_go: Callable[[list[int]], None],
) -> StepFailure:
    """Waits until the step has ended on every worker, or for `timeout_s`.

    Args:
        policy_refs: what will be answered by the policy's workers.
        generation_refs: what will be answered by the engines.
        timeout_s: how long to wait.
        let_go: called with places in both lists, one after the other, when others still wait: of
            workers that live and have failed, each once. It makes the others notice that.
    """
    answers = [*policy_refs, *generation_refs]
    refs = [ref for ref in answers if isinstance(ref, ObjectRef)]
    until_s = time.monotonic() + timeout_s
    gone: set[int] = set()
    while refs and (left_s := until_s - time.monotonic()) > 0:
        _, busy = ray.wait(refs, num_returns=len(refs), timeout=min(ECHO_S, left_s))
        if not busy:
            break
        failed = [
            place
            for place, ref in enumerate(answers)
            if ref not in busy and place not in gone and _lives_and_failed(_answer_of(ref))
        ]
        if failed:
            gone.update(failed)
            let_go(failed)
    return StepFailure(
        policy=tuple(_answer_of(ref) for ref in policy_refs),
        engines=tuple(_answer_of(ref) for ref in generation_refs),
    )


def is_echo(error: Exception) -> bool:
    """Whether a worker failed only because it heard that, or saw how, another one did."""
    if isinstance(error, EngineStepFailed):
        return error.echo
    return isinstance(error, PeerFailed | PeerLost)


def _lives_and_failed(answer: object) -> bool:
    """Whether a worker's process is there after its failure: the end of one is noticed anyway."""
    return isinstance(answer, Exception) and not isinstance(answer, RayActorError)


def _answer_of(ref: object) -> object:
    if not isinstance(ref, ObjectRef):
        return None
    try:
        return ray.get(ref, timeout=0)
    except Exception as error:
        return error
