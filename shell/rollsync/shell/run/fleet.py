"""The generation engines of a run: starts them, and asks again and again whether they are there.

What an engine is good for, and what follows from its death, is decided by
`rollsync.pure.refit.fleet`; here its events are gathered and its decisions carried out. Rule kept
here: an engine that the ledger calls dead is killed, so that it cannot come back as another one.
What engines are asked to generate is `fleet_requests`', what they are synced to `fleet_sync`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import ray
from msgspec import Struct
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from returns.pipeline import is_successful

from rollsync.pure.refit.fleet.decisions import awaits_sync, free_slot, replacements_wanted
from rollsync.pure.refit.fleet.errors import describe_fleet_error
from rollsync.pure.refit.fleet.events import (
    ActorDied,
    EngineJoined,
    EngineStarted,
    FleetEvent,
    ProbeAnswered,
    ProbeMissed,
)
from rollsync.pure.refit.fleet.state import (
    EnginePhase,
    FleetLost,
    FleetSettings,
    FleetState,
    new_fleet,
)
from rollsync.pure.refit.fleet.transitions import apply_to_fleet
from rollsync.pure.refit.lifecycle import Closed
from rollsync.shell.actor_deaths import is_death
from rollsync.shell.refit.generation import EngineProbe
from rollsync.shell.refit.worker_group import Actor, call_remote
from rollsync.shell.rollout.clients import EnginesLost
from rollsync.shell.rollout.waiting import ChangeSignal


class EngineNotice(Struct, frozen=True, kw_only=True):
    """An engine is good for something else than before."""

    engine: str
    was: EnginePhase | None
    """None for one whose start has begun."""
    now: EnginePhase
    why: str
    weight_version: int | None
    probe: EngineProbe | None
    """Its last answer, with its process and host; None before the first."""


@dataclass
class _Engine:
    """What the fleet keeps of an engine, beside its record in the ledger.

    Attributes:
        watch: waits for its start, and then probes it.
        probe: its last answer.
        told: the phase that was last told of it.
    """

    actor: Actor
    slot: int
    watch: asyncio.Task[None]
    probe: EngineProbe | None = None
    told: EnginePhase | None = None


class EngineFleet:
    """The engines, each a Ray actor; used in an `async with`, in one event loop.

    Args:
        start: starts the actor of an engine, which has the methods of
            `rollsync.shell.refit.torch_generation.TorchGenerationWorker`. It is given the engine's
            slot, counted from 0: a replacement takes that of a dead one.
        engines: how many the run wants.
        settings: when an engine counts as lost.
        notice: told when an engine becomes good for something else; not of syncs that go well.
    """

    def __init__(
        self,
        start: Callable[[int], Actor],
        *,
        engines: int,
        settings: FleetSettings,
        notice: Callable[[EngineNotice], None] = lambda _: None,
    ) -> None:
        self.state: FleetState = new_fleet(settings, wanted=engines)
        self.changes = ChangeSignal()
        self._start = start
        self._notice = notice
        self._listeners: list[Callable[[], None]] = []
        self._engines: dict[str, _Engine] = {}

    async def __aenter__(self) -> Self:
        while len(self.state.engines) < self.state.wanted:
            self._start_engine()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        engines = list(self._engines.values())
        for engine in engines:
            engine.watch.cancel()
        await asyncio.gather(*(engine.watch for engine in engines), return_exceptions=True)
        for engine in engines:
            _kill(engine.actor)

    def sync_is_due(self) -> bool:
        """Whether an engine waits for weights that the others have."""
        return awaits_sync(self.state)

    def listen(self, changed: Callable[[], None]) -> None:
        """Have `changed` called after every change."""
        self._listeners.append(changed)

    async def until(self, holds: Callable[[FleetState], bool]) -> None:
        """Wait until `holds` is true of the state."""
        while not holds(self.state):
            await self.changes.wait_past(self.changes.version)

    async def wait_lost(self) -> EnginesLost:
        """Wait until too few engines are left, and say how that came."""
        while self.state.lost is None:
            await self.changes.wait_past(self.changes.version)
        return engines_lost(self.state.lost)

    def apply(self, event: FleetEvent) -> None:
        """Take an event into the ledger, and carry out what follows."""
        result = apply_to_fleet(self.state, event)
        if not is_successful(result):
            raise AssertionError(describe_fleet_error(result.failure()))
        if result.unwrap() is self.state:
            return
        self.state = result.unwrap()
        self._tell()
        while replacements_wanted(self.state) > 0:
            self._start_engine()
        self.changes.notify()
        for listener in self._listeners:
            listener()

    def _start_engine(self) -> None:
        name = f"engine-{len(self.state.engines)}"
        slot = free_slot(self.state, {other: each.slot for other, each in self._engines.items()})
        self._engines[name] = _Engine(
            actor=self._start(slot),
            slot=slot,
            watch=asyncio.create_task(self._watch(name), name=name),
        )
        self.apply(EngineStarted(name))

    def _tell(self) -> None:
        for name in self.state.started:
            record, engine = self.state.engines[name], self._engines[name]
            was = engine.told
            if record.phase in (was, EnginePhase.SYNCING):
                continue
            engine.told = record.phase
            if record.phase is EnginePhase.DEAD:
                _kill(engine.actor)
            self._notice(
                EngineNotice(
                    engine=name,
                    was=was,
                    now=record.phase,
                    why=record.cause,
                    weight_version=record.version,
                    probe=engine.probe,
                )
            )

    async def _watch(self, name: str) -> None:
        """Wait for an engine's start, then ask again and again whether it is there."""
        settings, engine = self.state.settings, self._engines[name]
        try:
            async with asyncio.timeout(settings.join_timeout_s):
                engine.probe = await call_remote(engine.actor, "start")
        except TimeoutError:
            why = f"it did not start within {settings.join_timeout_s:g} s"
            self.apply(ActorDied(name, why))
            return
        except RayError as error:
            self.apply(ActorDied(name, f"it did not start: {reason_of(error)}"))
            return
        self.apply(EngineJoined(name))
        while self.state.engines[name].phase is not EnginePhase.DEAD:
            await asyncio.sleep(settings.probe_interval_s)
            self.apply(await self.probe(name) or ProbeAnswered(name))

    async def probe(self, name: str) -> ProbeMissed | ActorDied | None:
        """Ask an engine whether it is there; what to make of it, None when it is."""
        engine = self._engines[name]
        try:
            async with asyncio.timeout(self.state.settings.probe_timeout_s):
                probe: EngineProbe = await call_remote(engine.actor, "probe")
        except TimeoutError:
            return ProbeMissed(name)
        except RayError as error:
            return ActorDied(name, reason_of(error)) if is_death(error) else ProbeMissed(name)
        engine.probe = probe
        if isinstance(probe.state, Closed):
            return ActorDied(name, "the processes of its engine have ended")
        return None

    def actor_of(self, name: str) -> Actor:
        """Takes an engine's calls, also of one that is dead."""
        return self._engines[name].actor

    def slot_of(self, name: str) -> int:
        """Which slot an engine has: of those that are not dead, no two have the same."""
        return self._engines[name].slot

    def last_probe(self, name: str) -> EngineProbe | None:
        """What an engine answered last."""
        return self._engines[name].probe


def engines_lost(lost: FleetLost) -> EnginesLost:
    """The loss of a fleet, as an exception."""
    causes = "; ".join(lost.causes)
    return EnginesLost(
        f"{lost.able} generation engines are left, and the run goes on with no fewer than"
        f" {max(1, lost.min_healthy)} (generation.fleet.min_healthy): {causes}",
        remedy="see Ray's logs of the engines; the same command goes on from the last save",
    )


def reason_of(error: Exception) -> str:
    """The line of an error that says most: the last of a remote traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if isinstance(error, RayActorError) else lines[-1]


def _kill(actor: Actor) -> None:
    if isinstance(actor, ActorHandle):
        ray.kill(actor)
