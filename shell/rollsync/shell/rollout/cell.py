"""The one mutable place of a run's rollout state.

Rules kept here: the state changes only by `pure`'s `apply`, only inside a live section of the run's
barrier, and all events of one call or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from returns.pipeline import is_successful

from rollsync.pure.rollout.events import RolloutEvent
from rollsync.pure.rollout.state import RolloutState
from rollsync.pure.rollout.transitions import apply
from rollsync.shell.rollout.barrier import (
    CheckpointMutationKind,
    DataPlaneCheckpointBarrier,
    DataPlaneMutationSection,
)
from rollsync.shell.rollout.errors import BarrierMisuse, RolloutTransitionError

TransitionListener = Callable[[RolloutEvent, RolloutState], None]
"""Told of each event that happened and of the state after it."""


class StateCell:
    """Holds the current `RolloutState`.

    Args:
        state: where the run begins; a restore replaces it.
        barrier: the run's barrier; sections of another one are refused.
    """

    def __init__(self, state: RolloutState, barrier: DataPlaneCheckpointBarrier) -> None:
        self._state = state
        self._barrier = barrier
        self._listeners: list[TransitionListener] = []
        self.restores = 0
        """How often a whole state was put in place, which no event describes."""

    @property
    def state(self) -> RolloutState:
        """The current value. It is frozen, so it can be kept."""
        return self._state

    def listen(self, listener: TransitionListener) -> None:
        """Have `listener` told of every later event, in the order in which they happen."""
        self._listeners.append(listener)

    def apply(self, section: DataPlaneMutationSection, *events: RolloutEvent) -> RolloutState:
        """Change the state by `events`, in order: by all of them or by none.

        Raises:
            BarrierMisuse: the section has ended or is another barrier's.
            RolloutTransitionError: the state does not allow an event; it is unchanged.
        """
        section.require_live(self._barrier)
        state = self._state
        steps: list[tuple[RolloutEvent, RolloutState]] = []
        for event in events:
            state = _after(state, event)
            steps.append((event, state))
        self._state = state
        for event, reached in steps:
            for listener in self._listeners:
                listener(event, reached)
        return state

    def preview(self, event: RolloutEvent) -> RolloutState:
        """The state that `event` would lead to now; nothing changes.

        Raises:
            RolloutTransitionError: the state does not allow the event.
        """
        return _after(self._state, event)

    def restore(
        self,
        section: DataPlaneMutationSection,
        state: RolloutState,
        events: Sequence[RolloutEvent] = (),
    ) -> None:
        """Put a whole state in place, as a restore does before the pumps start.

        Args:
            state: the state to go on from.
            events: what led to it since it was saved; listeners are told of each, with `state`.

        Raises:
            BarrierMisuse: the section is not a live one of kind `recovery_restore`.
        """
        section.require_live(self._barrier)
        if section.kind is not CheckpointMutationKind.RECOVERY_RESTORE:
            raise BarrierMisuse(
                f"a {section.kind} section may not replace the whole state",
                remedy="restore inside a recovery_restore section",
            )
        self._state = state
        self.restores += 1
        for event in events:
            for listener in self._listeners:
                listener(event, state)


def _after(state: RolloutState, event: RolloutEvent) -> RolloutState:
    after = apply(state, event)
    if not is_successful(after):
        raise RolloutTransitionError(event, after.failure())
    return after.unwrap()
