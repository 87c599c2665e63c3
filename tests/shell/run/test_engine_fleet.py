"""Who is asked, who is asked again, who is given up and who takes its place."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from rollsync.pure.refit.fleet.events import EngineSynced, SyncClosed, SyncStarted
from rollsync.pure.refit.fleet.state import EnginePhase, FleetSettings
from rollsync.pure.refit.lifecycle import Closed
from rollsync.shell.refit.errors import EngineNotServing, EngineOutdated, RefitError
from rollsync.shell.rollout.clients import GenerationFailed
from tests.shell.run.scripted_engines import (
    QUICK,
    ScriptedEngine,
    raising,
    running_fleet,
    serving_fleet,
)

pytestmark = pytest.mark.asyncio
PATIENT = replace(QUICK, probe_interval_s=3600.0)
"""Probes come too late to find anything."""


async def test_a_request_of_an_engine_that_dies_fails_and_is_answered_by_another() -> None:
    async with serving_fleet(2, PATIENT) as run:
        run.made[0].died = True
        with pytest.raises(GenerationFailed, match="engine-0 gave a request up"):
            await run.ask()
        assert run.phase(0) is EnginePhase.DEAD
        for seed in range(3):
            assert (await run.ask(seed)).token_ids == (seed,)
        assert (run.made[0].requests, run.made[1].requests) == (1, 3)


async def test_the_engine_with_least_to_do_is_asked() -> None:
    async with serving_fleet(2) as run:
        go_on = asyncio.Event()

        async def wait(number: int) -> None:
            await go_on.wait()

        for engine in run.made:
            engine.answers = wait
        asked = [asyncio.create_task(run.ask(seed)) for seed in range(4)]
        while sum(engine.requests for engine in run.made) < 4:
            await asyncio.sleep(0)
        assert [engine.requests for engine in run.made] == [2, 2]
        go_on.set()
        assert [each.token_ids for each in await asyncio.gather(*asked)] == [(0,), (1,), (2,), (3,)]


async def test_what_an_engine_has_done_is_not_held_against_it() -> None:
    async with serving_fleet(2) as run:
        never = asyncio.Event()

        async def wait(number: int) -> None:
            await never.wait()

        run.made[1].answers = wait
        asked = [asyncio.create_task(run.ask(seed)) for seed in range(2)]
        while run.made[1].requests == 0:
            await asyncio.sleep(0)
        for _ in range(3):
            await run.ask()
        assert (run.made[0].requests, run.made[1].requests) == (4, 1)
        never.set()
        await asyncio.gather(*asked)


async def test_what_an_engine_refuses_is_given_to_another_and_it_waits_for_a_sync() -> None:
    async with serving_fleet(2) as run:
        run.made[0].answers = raising(EngineNotServing("it is poisoned", state="poisoned"))
        assert (await run.ask()).weight_version == 1
        assert run.phase(0) is EnginePhase.OUTDATED
        assert run.fleet.sync_is_due()
        await run.ask()
        assert (run.made[0].requests, run.made[1].requests) == (1, 2)


async def test_an_engine_with_older_weights_than_the_ledger_thinks_waits_for_a_sync() -> None:
    async with serving_fleet(2) as run:
        run.made[0].answers = raising(EngineOutdated(serving=0, wanted=1))
        await run.ask()
        assert run.phase(0) is EnginePhase.OUTDATED


@pytest.mark.parametrize("ended", [False, True], ids=["sync under way", "sync ended"])
async def test_a_request_that_a_sync_overtakes_is_made_again_with_the_new_weights(
    ended: bool,
) -> None:
    async with serving_fleet(1) as run:
        under_way, synced = asyncio.Event(), asyncio.Event()

        async def overtaken(number: int) -> None:
            if number == 1:
                under_way.set()
                await synced.wait()
                raise EngineOutdated(serving=2, wanted=1)

        run.made[0].answers = overtaken
        asked = asyncio.create_task(run.ask())
        await under_way.wait()
        run.fleet.apply(SyncStarted(2, ("engine-0",)))
        if not ended:
            synced.set()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not asked.done()
            assert run.made[0].requests == 1, "an engine in a sync is not asked"
        for event in (EngineSynced("engine-0"), SyncClosed()):
            run.fleet.apply(event)
        synced.set()
        assert (await asked).weight_version == 2
        assert run.phase(0) is EnginePhase.HEALTHY


@pytest.mark.parametrize("late", [False, True], ids=["raises", "late"])
async def test_an_engine_that_fails_at_requests_in_a_row_is_given_up(late: bool) -> None:
    settings = replace(PATIENT, max_request_failures=2, request_timeout_s=0.02)

    async def hang(number: int) -> None:
        await asyncio.Event().wait()

    async with serving_fleet(1, settings) as run:
        run.made[0].answers = hang if late else raising(RefitError("out of memory"))
        why = "no completion within 0.02 s" if late else "out of memory"
        for phase in (EnginePhase.HEALTHY, EnginePhase.DEAD):
            with pytest.raises(GenerationFailed, match=why):
                await run.ask()
            assert run.phase(0) is phase


async def test_an_engine_that_fails_now_and_then_stays() -> None:
    settings = replace(PATIENT, max_request_failures=2)

    async def every_other(number: int) -> None:
        if number % 2:
            raise RefitError("out of memory")

    async with serving_fleet(1, settings) as run:
        run.made[0].answers = every_other
        for _ in range(3):
            with pytest.raises(GenerationFailed):
                await run.ask()
            await run.ask()
        assert run.phase(0) is EnginePhase.HEALTHY


async def test_a_silent_engine_gets_no_work_until_it_answers_again() -> None:
    settings = replace(QUICK, dead_after=1_000_000)
    async with serving_fleet(2, settings) as run:
        run.made[0].silent.set()
        await run.until(0, EnginePhase.SUSPECT)
        for _ in range(3):
            await run.ask()
        assert run.made[0].requests == 0
        run.made[0].silent.clear()
        await run.until(0, EnginePhase.HEALTHY)
        run.made[1].died = True
        await run.until(1, EnginePhase.DEAD)
        assert (await run.ask()).weight_version == 1
        assert run.made[0].requests == 1


@pytest.mark.parametrize("how", ["died", "silent", "closed"])
async def test_a_lost_engine_is_replaced_in_its_place_and_serves_after_a_sync(how: str) -> None:
    async with serving_fleet(2) as run:
        lost, other = run.made
        lost.died = how == "died"
        if how == "silent":
            lost.silent.set()
        if how == "closed":
            lost.state = Closed()
        await run.until(0, EnginePhase.DEAD)
        await run.until(2, EnginePhase.OUTDATED)
        assert run.slots == [0, 1, 0]
        for _ in range(3):
            await run.ask()
        new = run.made[2]
        assert (other.requests, new.requests) == (3, 0)
        other.died = True
        await run.until(1, EnginePhase.DEAD)
        asked = asyncio.create_task(run.ask())
        new.heard.clear()
        await new.heard.wait()
        assert not asked.done(), "without weights it does not serve"
        run.sync(1, 2)
        assert (await asked).weight_version == 1
        assert new.requests == 1
        told = [notice.now for notice in run.notices if notice.engine == "engine-2"]
        assert told == [EnginePhase.JOINING, EnginePhase.OUTDATED, EnginePhase.HEALTHY]


@pytest.mark.parametrize("how", ["never", "dies"])
async def test_an_engine_that_does_not_start_is_replaced(how: str) -> None:
    engine = ScriptedEngine()
    engine.died = how == "dies"

    async def never() -> None:
        if how == "never":
            await asyncio.Event().wait()

    engine.starts = never
    settings = replace(QUICK, join_timeout_s=0.05)
    async with running_fleet(2, settings, upcoming=[engine]) as run:
        await run.until(0, EnginePhase.DEAD)
        why = run.fleet.state.engines["engine-0"].cause
        assert why.startswith("it did not start within 0.05 s" if how == "never" else "it did not")
        await run.until(2, EnginePhase.OUTDATED)
        assert run.slots == [0, 1, 0]


async def test_below_the_minimum_the_fleet_is_lost_by_name_and_serves_no_more() -> None:
    settings = FleetSettings(min_healthy=2, probe_interval_s=0.005)
    async with serving_fleet(2, settings) as run:
        lost = asyncio.create_task(run.fleet.wait_lost())
        await asyncio.sleep(0)
        assert not lost.done()
        run.made[1].died = True
        said = str(await lost)
        assert "1 generation engines are left" in said
        assert "no fewer than 2 (generation.fleet.min_healthy)" in said
        assert "engine-1: " in said
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await run.ask()
        assert len(run.made) == 2, "nothing is started for a run that ends"
