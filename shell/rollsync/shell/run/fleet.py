"""The generation engines of a run: starts them, asks whether they are there, and gives them work.

What an engine is good for, and what follows from its death, is decided by
`rollsync.pure.refit.fleet`; here its events are gathered and its decisions carried out. Rules kept
here: an engine that the ledger calls dead is killed, so that it cannot come back as another one;
and a request goes only to an engine that serves the version of the newest sync.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import ray
from msgspec import Struct
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from returns.pipeline import is_successful

from rollsync.pure.refit.fleet.decisions import awaits_sync, may_serve, replacements_wanted
from rollsync.pure.refit.fleet.errors import describe_fleet_error
from rollsync.pure.refit.fleet.events import (
    ActorDied,
    EngineJoined,
    EngineStarted,
    FleetEvent,
    ProbeAnswered,
    ProbeMissed,
    RequestAnswered,
    RequestFailed,
    RequestRefused,
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
from rollsync.shell.refit.errors import EngineNotServing, EngineOutdated, RefitError
from rollsync.shell.refit.generation import Completion, EngineProbe, SamplingSettings
from rollsync.shell.refit.worker_group import Actor, call_remote, is_death
from rollsync.shell.rollout.clients import EnginesLost, GenerationFailed
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
        self.actors: dict[str, Actor] = {}
        self.changes = ChangeSignal()
        self._start = start
        self._notice = notice
        self._listeners: list[Callable[[], None]] = []
        self._told: dict[str, EnginePhase] = {}
        self._probes: dict[str, EngineProbe] = {}
        self._slots: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

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
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for actor in self.actors.values():
            _kill(actor)

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

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingSettings, *, seed: int
    ) -> list[Completion]:
        """Sample on the engine that has least to do, of those with the newest weights.

        Raises:
            GenerationFailed: the engine failed or died; what it did not take is given to another.
        """
        while True:
            engine, version = await self._acquire()
            self._running[engine] += 1
            try:
                completions = await self._ask(engine, prompt_token_ids, sampling, seed, version)
            finally:
                self._running[engine] -= 1
            if completions is not None:
                return completions

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
        taken = {
            self._slots[other]
            for other, record in self.state.engines.items()
            if record.phase is not EnginePhase.DEAD
        }
        slot = next(slot for slot in range(self.state.wanted) if slot not in taken)
        self._slots[name] = slot
        self.actors[name] = self._start(slot)
        self._running[name] = 0
        self._tasks[name] = asyncio.create_task(self._watch(name), name=name)
        self.apply(EngineStarted(name))

    def _tell(self) -> None:
        for name in self.state.started:
            record, was = self.state.engines[name], self._told.get(name)
            if record.phase in (was, EnginePhase.SYNCING):
                continue
            self._told[name] = record.phase
            if record.phase is EnginePhase.DEAD:
                _kill(self.actors[name])
            self._notice(
                EngineNotice(
                    engine=name,
                    was=was,
                    now=record.phase,
                    why=record.cause,
                    weight_version=record.version,
                    probe=self._probes.get(name),
                )
            )

    async def _watch(self, name: str) -> None:
        """Wait for an engine's start, then ask again and again whether it is there."""
        settings, actor = self.state.settings, self.actors[name]
        try:
            async with asyncio.timeout(settings.join_timeout_s):
                self._probes[name] = await call_remote(actor, "start")
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
        try:
            async with asyncio.timeout(self.state.settings.probe_timeout_s):
                probe: EngineProbe = await call_remote(self.actors[name], "probe")
        except TimeoutError:
            return ProbeMissed(name)
        except RayError as error:
            return ActorDied(name, reason_of(error)) if is_death(error) else ProbeMissed(name)
        self._probes[name] = probe
        if isinstance(probe.state, Closed):
            return ActorDied(name, "the processes of its engine have ended")
        return None

    def slot_of(self, name: str) -> int:
        """Whose place an engine has: of those that are not dead, no two have the same."""
        return self._slots[name]

    def last_probe(self, name: str) -> EngineProbe | None:
        """What an engine answered last."""
        return self._probes.get(name)

    async def _acquire(self) -> tuple[str, int]:
        while True:
            seen = self.changes.version
            version = self.state.target_version
            able = () if version is None else may_serve(self.state, version)
            if version is not None and able:
                return min(able, key=lambda name: self._running[name]), version
            await self.changes.wait_past(seen)

    async def _ask(
        self,
        engine: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        seed: int,
        version: int,
    ) -> list[Completion] | None:
        """Have one engine sample; None when it did not take the request."""
        try:
            async with asyncio.timeout(self.state.settings.request_timeout_s):
                completions: list[Completion] = await call_remote(
                    self.actors[engine],
                    "generate",
                    prompt_token_ids,
                    sampling,
                    seed=seed,
                    weight_version=version,
                )
        except EngineNotServing as error:
            self.apply(RequestRefused(engine, reason_of(error)))
            return None
        except EngineOutdated as error:
            # It may have been synced while the request was under way: then it is the newer one.
            if error.serving < error.wanted:
                self.apply(RequestRefused(engine, reason_of(error)))
            return None
        except TimeoutError:
            why = f"no completion within {self.state.settings.request_timeout_s:g} s"
            self.apply(RequestFailed(engine, why))
            raise GenerationFailed(f"{engine}: {why}") from None
        except (RefitError, RayError) as error:
            why = reason_of(error)
            died = is_death(error)
            self.apply(ActorDied(engine, why) if died else RequestFailed(engine, why))
            raise GenerationFailed(f"{engine} gave a request up: {why}") from error
        self.apply(RequestAnswered(engine))
        return completions


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
