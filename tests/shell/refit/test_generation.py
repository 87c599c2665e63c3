"""When an engine generates: never during an update, and never without whole weights."""

import asyncio

import pytest

from rollsync.pure.refit.lifecycle import (
    Closed,
    Connected,
    EngineState,
    Poisoned,
    Serving,
    Unconnected,
    Updating,
)
from rollsync.shell.refit.errors import EngineNotServing, EngineOutdated
from rollsync.shell.refit.generation import ServingGate


def opened(state: EngineState) -> ServingGate:
    gate = ServingGate()
    gate.state = state
    return gate


async def request(gate: ServingGate, weight_version: int | None = None) -> int:
    async with gate.request(weight_version) as version:
        return version


@pytest.mark.parametrize(
    "state",
    [Unconnected(), Connected(), Updating(3), Poisoned(3, "the link is down"), Closed()],
    ids=str,
)
def test_without_whole_weights_every_request_is_refused(state: EngineState) -> None:
    gate = opened(state)
    assert gate.weight_version is None
    with pytest.raises(EngineNotServing) as raised:
        asyncio.run(request(gate))
    assert raised.value.state == type(state).__name__.lower()
    if isinstance(state, Poisoned):
        assert "the link is down" in str(raised.value)


@pytest.mark.parametrize("connected", [True, False])
def test_whole_weights_serve_with_and_without_a_connection(connected: bool) -> None:
    gate = opened(Serving(3, connected=connected))
    assert gate.weight_version == 3
    assert asyncio.run(request(gate)) == 3
    assert asyncio.run(request(gate, 3)) == 3


@pytest.mark.parametrize("wanted", [0, 2, 4])
def test_another_version_than_the_wanted_one_is_refused(wanted: int) -> None:
    with pytest.raises(EngineOutdated) as raised:
        asyncio.run(request(opened(Serving(3)), wanted))
    assert (raised.value.serving, raised.value.wanted) == (3, wanted)


def test_an_update_waits_for_running_requests_and_holds_back_new_ones() -> None:
    async def run() -> list[str]:
        gate = opened(Serving(1))
        happened: list[str] = []
        may_end = asyncio.Event()

        async def old() -> None:
            async with gate.request() as version:
                happened.append(f"old starts at {version}")
                await may_end.wait()
                happened.append("old ends")

        async def update() -> None:
            async with gate.update():
                happened.append("update")
                gate.state = Updating(2)
                await asyncio.sleep(0)
                gate.state = Serving(2)

        async def new() -> None:
            async with gate.request() as version:
                happened.append(f"new starts at {version}")

        tasks = [asyncio.create_task(old())]
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(update()))
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(new()))
        await asyncio.sleep(0.01)
        may_end.set()
        await asyncio.gather(*tasks)
        return happened

    assert asyncio.run(run()) == ["old starts at 1", "old ends", "update", "new starts at 2"]


def test_an_update_is_told_from_when_it_may_write_to_when_it_has_ended() -> None:
    async def run() -> list[EngineState]:
        gate = opened(Serving(1))
        told: list[EngineState] = []

        async def update() -> None:
            async with gate.update():
                told.append(gate.state)
                assert gate.weight_version is None
                gate.state = Serving(7)

        async with gate.request():
            waiting = asyncio.create_task(update())
            await asyncio.sleep(0.01)
            # It waits for the request, which goes on with whole weights.
            told.append(gate.state)
        await waiting
        return [*told, gate.state]

    assert asyncio.run(run()) == [Serving(1), Updating(2), Serving(7)]


@pytest.mark.parametrize("state", [Unconnected(), Serving(1, connected=False), Closed()], ids=str)
def test_an_update_that_cannot_begin_changes_no_state(state: EngineState) -> None:
    async def run() -> EngineState:
        gate = opened(state)
        async with gate.update():
            pass
        return gate.state

    assert asyncio.run(run()) == state


def test_a_request_is_held_back_for_as_long_as_a_stream_may_take() -> None:
    async def run() -> int:
        gate = opened(Serving(1))
        gate.hold_by({"refit_timeout_s": 0.001})
        async with gate.update():
            with pytest.raises(
                EngineNotServing, match=r"held the request back for 0\.012 s"
            ) as held:
                await request(gate)
            assert held.value.state == "updating"
            gate.state = Serving(2)
        return await request(gate)

    assert asyncio.run(run()) == 2


def test_requests_held_back_by_a_failed_update_are_refused_and_the_gate_opens_again() -> None:
    async def run() -> int:
        gate = opened(Serving(1))
        held: list[asyncio.Task[int]] = []

        async def broken() -> None:
            async with gate.update():
                held.append(asyncio.create_task(request(gate)))
                await asyncio.sleep(0.01)
                gate.state = Poisoned(2, "lost")
                raise OSError("lost")

        with pytest.raises(OSError, match="lost"):
            await broken()
        with pytest.raises(EngineNotServing, match="lost"):
            await held[0]
        async with gate.update():
            gate.state = Serving(2)
        return await request(gate)

    assert asyncio.run(run()) == 2


def test_an_update_that_is_given_up_while_it_waits_does_not_close_the_gate() -> None:
    async def run() -> int:
        gate = opened(Serving(1))

        async def update() -> None:
            async with gate.update():
                raise AssertionError("a request runs")

        async with gate.request():
            waiting = asyncio.create_task(update())
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        return await request(gate)

    assert asyncio.run(run()) == 1


def test_updates_take_turns() -> None:
    async def run() -> list[int]:
        gate = opened(Serving(1))
        order: list[int] = []

        async def update(number: int) -> None:
            async with gate.update():
                order.append(number)
                await asyncio.sleep(0.01)
                order.append(number)

        await asyncio.gather(update(1), update(2))
        return order

    assert asyncio.run(run()) == [1, 1, 2, 2]
