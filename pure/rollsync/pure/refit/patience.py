"""How long a sync waits for what.

Rule kept here: every wait has an end. A stream of weights may take as long as it moves, and what
looks whether it does is its two ends, each of which waits no longer than `refit_timeout_s`; so what
bounds a whole stream has only to be long enough for one that works. Everything else that workers do
in a sync is short, whatever the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.pure.refit.errors import TimeoutRefused
from rollsync.pure.refit.steps import Step

DEFAULT_REFIT_TIMEOUT_S: Final = 300.0
"""How long one end of a stream waits for the other, if not configured."""

DEFAULT_STEP_TIMEOUT_S: Final = 600.0
"""How long a step that moves no weights may take, if not configured. The first one may have to wait
until a worker has started."""

LONGEST_TIMEOUT_S: Final = 1e9
"""What is longer is no deadline; it keeps out infinity, which YAML can write."""

WAITS_OF_A_STREAM: Final = 12
"""How many times `refit_timeout_s` a whole stream may take."""

EXTRA_WAIT_S: Final = 1.0
"""How much longer one is waited for that may be waiting for another; at most a tenth of a wait."""

REFIT_TIMEOUT: Final = "refit_timeout_s"
"""The name of that setting in a backend's options."""

STEP_TIMEOUT: Final = "step_timeout_s (in a run, cluster.collective_timeout_s)"
"""What the other one is called."""


class Limit(Struct, frozen=True):
    """How long a step is waited for.

    Attributes:
        until_s: reading of the clock by which `began_s` was given.
        waited_s: how long that is.
        since: from when on, in words; empty when it is from the beginning.
        setting: what makes it longer.
    """

    until_s: float
    waited_s: float
    since: str
    setting: str


def parse_timeout(setting: str, value: object) -> Result[float, TimeoutRefused]:
    """A configured number of seconds.

    Args:
        setting: its name.
        value: what was given.
    """
    refused = TimeoutRefused(setting=setting, value=repr(value), longest_s=LONGEST_TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Failure(refused)
    # Written so that what compares with nothing is refused as well.
    return Success(float(value)) if 0 < value <= LONGEST_TIMEOUT_S else Failure(refused)


def refit_timeout(options: Mapping[str, object]) -> Result[float, TimeoutRefused]:
    """How long one end of a stream waits for the other.

    Args:
        options: of a backend.
    """
    return parse_timeout(REFIT_TIMEOUT, options.get(REFIT_TIMEOUT, DEFAULT_REFIT_TIMEOUT_S))


def whole_stream_s(refit_timeout_s: float) -> float:
    """How long a whole stream of weights may take.

    Args:
        refit_timeout_s: longest wait for the other end of a stream.
    """
    return WAITS_OF_A_STREAM * refit_timeout_s


def limit_of(
    step: Step,
    *,
    began_s: float,
    side_done_s: float | None,
    refit_timeout_s: float,
    step_timeout_s: float,
) -> Limit:
    """How long a step is waited for now.

    Args:
        step: the step.
        began_s: when it began, by any clock.
        side_done_s: when the last of the policy's workers, or of the engines, had ended it; None
            while some of both sides are at it.
        refit_timeout_s: longest wait for the other end of a stream.
        step_timeout_s: longest wait for a step that moves no weights.
    """
    if step is not Step.TRANSFER:
        return Limit(began_s + step_timeout_s, step_timeout_s, "", STEP_TIMEOUT)
    if side_done_s is None:
        whole_s = whole_stream_s(refit_timeout_s)
        return Limit(began_s + whole_s, whole_s, "", REFIT_TIMEOUT)
    # No stream is under way any more: what is left to do is short.
    since = " after all workers of the other side had"
    return Limit(side_done_s + step_timeout_s, step_timeout_s, since, STEP_TIMEOUT)


def wait_s(refit_timeout_s: float, extra_waits: int) -> float:
    """How long one end of a stream waits for a worker, which may be waiting for another.

    Args:
        refit_timeout_s: for one that waits for nobody else.
        extra_waits: by how many of these it is waited for longer, as a `RoutingTable` has it (its
            `extra_waits_for_receiver` and `extra_waits_for_sender`).
    """
    return refit_timeout_s + extra_waits * min(EXTRA_WAIT_S, refit_timeout_s / 10)
