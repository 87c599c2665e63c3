"""What the rollout side of the shell raises, one class per family.

Rule kept here: an exception that stems from an error value of pure or codecs carries the value.
"""

from __future__ import annotations

from typing import ClassVar

from rollsync.pure.rollout.errors import TransitionError, why
from rollsync.pure.rollout.events import RolloutEvent
from rollsync.shell.errors import RollsyncError


class BarrierMisuse(RollsyncError):
    """A section or a cut was used where it gives no right: ended, foreign, or entered again."""


class RolloutTransitionError(RollsyncError):
    """An event that the state does not allow. The state is unchanged."""

    def __init__(self, event: RolloutEvent, value: TransitionError) -> None:
        super().__init__(f"{type(event).__name__} refused: {why(value)}")
        self.event = event
        self.value = value


class DataPlaneError(RollsyncError):
    """The data plane does not hold what it was asked for, or was given what it may not take."""


class WorkersLost(RollsyncError):
    """Processes that the run cannot do without are gone: it stops, and can be started again."""

    exit_code: ClassVar[int] = 3


class DataPlaneLost(DataPlaneError, WorkersLost):
    """Processes that held rows are gone, and the rows with them."""
