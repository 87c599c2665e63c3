"""The state cell: only by events, only in a live section, all of a call's events or none."""

from __future__ import annotations

import pytest

from rollsync.pure.rollout.errors import UnknownGroup
from rollsync.pure.rollout.events import FinalizationStarted, RolloutEvent
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.rollout.barrier import CheckpointMutationKind, DataPlaneCheckpointBarrier
from rollsync.shell.rollout.cell import StateCell
from rollsync.shell.rollout.errors import BarrierMisuse, RolloutTransitionError
from tests.pure.rollout.events_kit import fresh, reserve

RESERVATION = CheckpointMutationKind.PROMPT_RESERVATION


@pytest.mark.asyncio
async def test_events_change_the_state_and_listeners_hear_of_each() -> None:
    barrier = DataPlaneCheckpointBarrier()
    cell = StateCell(fresh(), barrier)
    heard: list[tuple[RolloutEvent, RolloutState]] = []
    cell.listen(lambda event, after: heard.append((event, after)))
    first, second = reserve(0, 1), reserve(2)
    async with barrier.mutation(RESERVATION) as section:
        after = cell.apply(section, first, second)
    assert set(after.ledger.groups) == {"e0p0", "e0p1", "e0p2"}
    assert cell.state is after
    assert [event for event, _ in heard] == [first, second]
    assert [len(reached.ledger.groups) for _, reached in heard] == [2, 3]


@pytest.mark.asyncio
async def test_a_refused_event_undoes_the_whole_call_and_carries_the_value() -> None:
    barrier = DataPlaneCheckpointBarrier()
    cell = StateCell(fresh(), barrier)
    heard: list[RolloutEvent] = []
    cell.listen(lambda event, _: heard.append(event))
    before = cell.state
    refused = FinalizationStarted(group_id="nobody")
    async with barrier.mutation(RESERVATION) as section:
        with pytest.raises(RolloutTransitionError, match="FinalizationStarted refused") as caught:
            cell.apply(section, reserve(0), refused)
    assert isinstance(caught.value.value, UnknownGroup)
    assert caught.value.event is refused
    assert cell.state is before
    assert heard == []


@pytest.mark.asyncio
async def test_only_a_live_section_of_this_barrier_may_change_it() -> None:
    barrier, other = DataPlaneCheckpointBarrier(), DataPlaneCheckpointBarrier()
    cell = StateCell(fresh(), barrier)
    async with other.mutation(RESERVATION) as foreign:
        with pytest.raises(BarrierMisuse, match="another barrier"):
            cell.apply(foreign, reserve(0))
    async with barrier.mutation(RESERVATION) as section:
        with pytest.raises(BarrierMisuse, match="may not replace"):
            cell.restore(section, fresh())
    with pytest.raises(BarrierMisuse, match="has ended"):
        cell.apply(section, reserve(0))
    async with barrier.mutation(CheckpointMutationKind.RECOVERY_RESTORE) as restoring:
        other_state, led_to_it = fresh(stamped=True), reserve(0)
        heard: list[tuple[RolloutEvent, RolloutState]] = []
        cell.listen(lambda event, after: heard.append((event, after)))
        cell.restore(restoring, other_state, [led_to_it])
    assert cell.state is other_state
    assert heard == [(led_to_it, other_state)]
