"""The rollout pump: what an engine's failures, a dropped group and closed admission come to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollsync.pure.rollout.dispatch import next_dispatch
from rollsync.pure.rollout.events import (
    AttemptDispatched,
    AttemptFailed,
    GroupCommitted,
    GroupDropped,
)
from rollsync.pure.rollout.state import Dropped, DropReason
from rollsync.shell.rollout.clients import EnginesLost, GenerationFailed
from tests.shell.rollout.pumps import Pumps
from tests.shell.rollout.world import World


@pytest.fixture
def pumps(tmp_path: Path) -> Pumps:
    return Pumps(World(tmp_path), tmp_path)


def failed() -> GenerationFailed:
    return GenerationFailed("this request did not work")


@pytest.mark.asyncio
async def test_a_batch_is_generated_and_published_with_its_rows(pumps: Pumps) -> None:
    async with pumps.rolling():
        await pumps.until(GroupCommitted, 2)
    state = pumps.world.state
    assert pumps.seen(AttemptFailed) == 0
    ready = next(iter(state.replay.values()))
    rows = (await pumps.world.buffer.rows_of([ready.group_id]))[ready.group_id]
    assert len(rows) == 2
    for row in rows:
        assert row["token_ids"][-2:].tolist() == [49, 50]
        assert int(row["prompt_length"]) == len(row["token_ids"]) - 2
        assert row["behaviour_log_probabilities"].tolist() == [-0.5, -0.25]


@pytest.mark.asyncio
async def test_siblings_are_sampled_with_seeds_of_their_own_and_a_retry_with_the_same(
    pumps: Pumps,
) -> None:
    pumps.engine.failing = [failed()]
    async with pumps.rolling():
        await pumps.until(GroupCommitted, 2)
    first = pumps.engine.asked[0]
    same = [each for each in pumps.engine.asked if each == first]
    assert len(same) == 2
    assert pumps.seen(AttemptFailed) == 1
    others = [each.seed for each in pumps.engine.asked if each != first]
    assert len(set(others)) == len(others)


@pytest.mark.asyncio
async def test_a_group_whose_attempts_are_used_up_is_dropped_with_its_reason(pumps: Pumps) -> None:
    pumps.engine.refuses_first_prompt = True
    async with pumps.rolling():
        await pumps.until(GroupDropped)
    (dropped,) = [each for each in pumps.world.state.outcomes.values() if isinstance(each, Dropped)]
    assert dropped.reason is DropReason.UNRECOVERABLE
    limit = pumps.config.recovery.max_attempts
    assert limit <= pumps.seen(AttemptFailed) <= 2 * limit


@pytest.mark.asyncio
async def test_attempts_that_failed_before_a_resume_count(pumps: Pumps) -> None:
    """All but one were used up by a process before: one more failure is the end."""
    group_id = await pumps.admit_batch()
    for _ in range(pumps.config.recovery.max_attempts - 1):
        dispatched = next_dispatch(pumps.world.state.ledger.groups[group_id], 0)
        assert dispatched is not None
        failure = AttemptFailed(
            group_id=group_id, sibling_index=0, attempt_index=dispatched.attempt_index
        )
        await pumps.world.do(dispatched, failure)
    before = pumps.seen(AttemptFailed)
    pumps.engine.failing = [failed()]
    async with pumps.rolling():
        await pumps.until(GroupDropped)
    assert pumps.seen(AttemptFailed) == before + 1
    assert isinstance(pumps.world.state.outcomes[group_id], Dropped)


@pytest.mark.asyncio
async def test_a_dropped_group_is_generated_no_further(pumps: Pumps) -> None:
    pumps.engine.may_answer.clear()
    async with pumps.rolling():
        await pumps.until(AttemptDispatched, 2)
        while len(pumps.engine.asked) < 2:
            await asyncio.sleep(0.001)
        group_id = min(pumps.world.state.ledger.groups)
        await pumps.rollouts.drop(group_id, DropReason.STALE)
        while pumps.engine.cancelled < 2:
            await asyncio.sleep(0.001)
        pumps.engine.may_answer.set()
        await pumps.until(GroupCommitted)
    assert group_id in pumps.world.state.outcomes
    assert group_id not in pumps.world.state.replay


@pytest.mark.asyncio
async def test_closed_admission_starts_nothing_and_ends_nothing(pumps: Pumps) -> None:
    pumps.engine.may_answer.clear()
    async with pumps.rolling():
        await pumps.until(AttemptDispatched)
        pumps.rollouts.close_admission("the environment did not resume")
        admitted = set(pumps.world.state.ledger.groups)
        pumps.engine.may_answer.set()
        await pumps.until(GroupCommitted)
        await asyncio.sleep(0.05)
    assert {*pumps.world.state.ledger.groups, *pumps.world.state.replay} <= admitted


@pytest.mark.asyncio
async def test_lost_engines_end_the_pump(pumps: Pumps) -> None:
    pumps.engine.failing = [EnginesLost("no engine is left")]
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(pumps.rollouts.run(), 20)
    assert caught.group_contains(EnginesLost, match="no engine is left")
