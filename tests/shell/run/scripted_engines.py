"""Engines of a fleet that do what a test says, when it says so, in the test's own event loop.

For moments that a process cannot be made to die at, such as between its last answer and the note
that is taken of it. What real engines do in a run is in `test_fleet.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ray.exceptions import ActorDiedError

from rollsync.pure.refit.fleet.events import EngineSynced, SyncClosed, SyncStarted
from rollsync.pure.refit.fleet.state import EnginePhase, FleetSettings
from rollsync.pure.refit.lifecycle import EngineState, Unconnected
from rollsync.shell.refit.generation import Completion, EngineProbe, SamplingSettings
from rollsync.shell.run.fleet import EngineFleet, EngineNotice
from rollsync.shell.run.fleet_requests import EngineRequests

SAMPLING = SamplingSettings(max_new_tokens=1)
QUICK = FleetSettings(probe_interval_s=0.005, probe_timeout_s=5.0, suspect_after=1, dead_after=3)


@dataclass(frozen=True)
class Method:
    """A method of an actor, which is called through `remote`."""

    remote: Callable[..., Awaitable[object]]


class ScriptedEngine:
    """An engine's actor. Everything it does may be set; as it is made, all goes well."""

    def __init__(self) -> None:
        self.state: EngineState = Unconnected()
        self.starts: Callable[[], Awaitable[object]] = _at_once
        self.answers: Callable[[int], Awaitable[None]] = _at_once
        """Awaited by a request, with its number."""
        self.died = False
        self.silent = asyncio.Event()
        self.heard = asyncio.Event()
        """Set whenever a probe is answered."""
        self.requests = 0
        self.start = Method(self._start)
        self.probe = Method(self._probe)
        self.generate = Method(self._generate)

    async def _start(self) -> EngineProbe:
        await self.starts()
        return await self._probe()

    async def _probe(self) -> EngineProbe:
        self._look_alive()
        if self.silent.is_set():
            raise TimeoutError
        self.heard.set()
        return EngineProbe(self.state, pid=1, host="here")

    async def _generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        weight_version: int,
    ) -> list[Completion]:
        self.requests += 1
        await self.answers(self.requests)
        self._look_alive()
        return [Completion((seed,), (0.0,), "length", weight_version)]

    def _look_alive(self) -> None:
        if self.died:
            raise ActorDiedError


async def _at_once(number: int = 0) -> None:
    await asyncio.sleep(0)


def raising(error: Exception) -> Callable[[int], Awaitable[None]]:
    """Requests that fail so."""

    async def fail(number: int) -> None:
        raise error

    return fail


class ScriptedFleet:
    """A fleet of such engines, by name, and what it told."""

    def __init__(self, count: int, settings: FleetSettings) -> None:
        self.made: list[ScriptedEngine] = []
        self.slots: list[int] = []
        self.notices: list[EngineNotice] = []
        self.upcoming: list[ScriptedEngine] = []
        """Engines to start next; else one that does well."""
        self.fleet = EngineFleet(
            self._start, engines=count, settings=settings, notice=self.notices.append
        )
        self._requests = EngineRequests(self.fleet)

    def _start(self, slot: int) -> ScriptedEngine:
        engine = self.upcoming.pop(0) if self.upcoming else ScriptedEngine()
        self.made.append(engine)
        self.slots.append(slot)
        return engine

    def phase(self, number: int) -> EnginePhase:
        """Of the engine that was started as the `number`-th."""
        return self.fleet.state.engines[f"engine-{number}"].phase

    async def until(self, number: int, phase: EnginePhase) -> None:
        """Wait until an engine is in a phase."""
        name = f"engine-{number}"
        await self.fleet.until(
            lambda state: name in state.engines and state.engines[name].phase is phase
        )

    def sync(self, version: int, *numbers: int) -> None:
        """A sync of these engines that goes well."""
        names = tuple(f"engine-{number}" for number in numbers)
        self.fleet.apply(SyncStarted(version, names))
        for name in names:
            self.fleet.apply(EngineSynced(name))
        self.fleet.apply(SyncClosed())

    async def ask(self, seed: int = 0) -> Completion:
        """One request."""
        (completion,) = await self._requests.generate([1], SAMPLING, seed=seed)
        return completion


@asynccontextmanager
async def running_fleet(
    count: int, settings: FleetSettings = QUICK, *, upcoming: Sequence[ScriptedEngine] = ()
) -> AsyncIterator[ScriptedFleet]:
    """A fleet of `count` engines, of which `upcoming` are started first."""
    scripted = ScriptedFleet(count, settings)
    scripted.upcoming = list(upcoming)
    async with asyncio.timeout(30), scripted.fleet:
        yield scripted


@asynccontextmanager
async def serving_fleet(
    count: int, settings: FleetSettings = QUICK
) -> AsyncIterator[ScriptedFleet]:
    """A fleet that has started and serves version 1."""
    async with running_fleet(count, settings) as scripted:
        for number in range(count):
            await scripted.until(number, EnginePhase.OUTDATED)
        scripted.sync(1, *range(count))
        yield scripted
