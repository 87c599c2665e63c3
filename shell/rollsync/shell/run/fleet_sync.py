"""Syncs of a fleet whose engines come and go.

Rule kept here: each attempt's outcome is noted for every engine that took part before anything else
is decided, from what the engine itself says of its weights; and a sync that failed because of an
engine is tried again without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from ray.exceptions import RayActorError

from rollsync.pure.refit.fleet.decisions import (
    RetrySync,
    SyncDone,
    SyncGivenUp,
    after_failed_attempt,
    after_sync,
    may_sync,
    takes_part,
)
from rollsync.pure.refit.fleet.events import (
    EngineSynced,
    EngineSyncFailed,
    SyncClosed,
    SyncStarted,
)
from rollsync.shell.actor_deaths import is_death
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.errors import RefitError, WorkerGone, WorkerUnresponsive
from rollsync.shell.refit.report import SyncReport, WorkerTransfer
from rollsync.shell.refit.worker_group import GenerationGroup
from rollsync.shell.rollout.clients import SyncFigures, TrainerLost, trainer_lost
from rollsync.shell.run.fleet import EngineFleet, engines_lost, reason_of

ALL_DIED: Final = "every engine that took part died at its end"
GOES_ON: Final = "the same command goes on from the last save"
Retried = Callable[[int, str], None]
"""Told of a sync that is tried again: its version, and why the last attempt failed."""


class Versioned(Protocol):
    """Whose weights have a version: the trainer."""

    @property
    def trainer_version(self) -> int:
        """Of the weights, as of its last answer."""
        ...


class FleetSync:
    """Brings the engines of a fleet to the trainer's weights; see
    `rollsync.shell.rollout.clients.WeightSync`.

    Args:
        fleet: the engines.
        group: the face of them that `synchronizer` drives; it is told who takes part.
        synchronizer: moves the weights; its calls block.
        trainer: says which version its weights are.
        retried: told of every further attempt.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        *,
        group: GenerationGroup,
        synchronizer: CheckpointEngineWeightSynchronizer,
        trainer: Versioned,
        retried: Retried = lambda version, why: None,
    ) -> None:
        self._fleet = fleet
        self._group = group
        self._synchronizer = synchronizer
        self._trainer = trainer
        self._retried = retried
        self._connected: tuple[str, ...] = ()
        self._failed = False

    async def shutdown(self) -> None:
        """Release what the connection holds."""
        await asyncio.to_thread(self._synchronizer.shutdown)

    async def __call__(self) -> SyncFigures:
        """Move the weights, over as many attempts as there are engines that break one."""
        began_s = time.perf_counter()
        while True:
            engines = await self._next_engines()
            version = self._trainer.trainer_version
            while True:
                self._fleet.apply(SyncStarted(version, engines))
                # By slot, so that a replacement is fed by whoever fed the engine before it.
                by_slot = tuple(sorted(engines, key=self._fleet.slot_of))
                outcome = await self._attempt(version, by_slot)
                lost = self._trainer_lost(outcome)
                decided = after_sync(self._fleet.state, trainer_lost=lost is not None)
                if not isinstance(decided, RetrySync):
                    break
                engines = decided.engines
                # An engine may die between its last answer and the note of it.
                self._retried(version, _why(outcome))
            self._fleet.apply(SyncClosed())
            if self._fleet.state.lost is not None:
                raise engines_lost(self._fleet.state.lost)
            if isinstance(decided, SyncDone):
                seconds = time.perf_counter() - began_s
                return self._figures(version, outcome, seconds)
            if isinstance(decided, SyncGivenUp):
                raise self._given_up(decided, outcome, lost)

    async def _next_engines(self) -> tuple[str, ...]:
        """Who takes part in the sync that begins now; waits until somebody can."""
        await self._fleet.until(lambda state: state.lost is not None or may_sync(state))
        if self._fleet.state.lost is not None:
            raise engines_lost(self._fleet.state.lost)
        return takes_part(self._fleet.state)

    async def _attempt(self, version: int, engines: tuple[str, ...]) -> SyncFigures | Exception:
        """One attempt, with its outcome for every engine noted."""
        began_s = time.perf_counter()
        try:
            report = await asyncio.to_thread(self._transfer, engines)
        except Exception as error:
            self._failed = True
            await self._note_failure(version, engines, error)
            return error
        if report.weight_version != version:
            differs = RefitError(
                f"the engines say that they serve weight version {report.weight_version}, and the"
                f" trainer is at {version}"
            )
            for name in engines:
                self._fleet.apply(EngineSyncFailed(name, differs.message, own=False))
            return differs
        for name in engines:
            self._fleet.apply(EngineSynced(name))
        return SyncFigures(
            weight_version=version,
            bytes=report.payload_bytes,
            seconds=time.perf_counter() - began_s,
        )

    def _transfer(self, engines: tuple[str, ...]) -> SyncReport:
        """Connects to these engines if others were connected, and moves the weights. Blocks."""
        if self._failed or engines != self._connected:
            self._group.use([self._fleet.actor_of(name) for name in engines])
            if self._connected or self._failed:
                self._synchronizer.reconnect()
            else:
                self._synchronizer.init_communicator()
            self._connected = engines
            self._failed = False
        return self._synchronizer.sync_weights()

    async def _note_failure(self, version: int, engines: Sequence[str], error: Exception) -> None:
        """Ask each engine what it holds now: an attempt may have failed after some had it all."""
        failure = self._synchronizer.last_failure
        answers: Sequence[object] = [None] * len(engines)
        blamed = frozenset[int]()
        if failure is not None and len(failure.engines) == len(engines):
            answers, blamed = failure.engines, failure.engines_to_blame
        if isinstance(error, WorkerUnresponsive):
            named = (self._group.name_of(place) for place in range(len(engines)))
            blamed |= {place for place, name in enumerate(named) if name in error.workers}
        probes = await asyncio.gather(*(self._fleet.probe(name) for name in engines))
        for place, (name, answer, missed) in enumerate(zip(engines, answers, probes, strict=True)):
            died = isinstance(answer, Exception) and is_death(answer)
            probe = self._fleet.last_probe(name)
            news = after_failed_attempt(
                name,
                version,
                died=reason_of(answer) if died and isinstance(answer, Exception) else None,
                missed=missed,
                state=None if probe is None else probe.state,
                to_blame=place in blamed,
                why=reason_of(error),
            )
            self._fleet.apply(news)

    def _trainer_lost(self, outcome: SyncFigures | Exception) -> TrainerLost | None:
        """The loss of the policy worker that was gone or stuck in the attempt, if one was."""
        failure = self._synchronizer.last_failure
        if failure is None or not isinstance(outcome, Exception):
            return None
        for rank, answer in enumerate(failure.policy):
            if isinstance(answer, RayActorError):
                return trainer_lost(answer, rank)
            if isinstance(answer, WorkerUnresponsive):
                return _lost_in_silence(answer)
        return None

    def _given_up(
        self, decided: SyncGivenUp, outcome: SyncFigures | Exception, lost: TrainerLost | None
    ) -> Exception:
        """Why there will not be another attempt."""
        if lost is not None:
            return lost
        if isinstance(outcome, RayActorError):
            # Engines' deaths are dealt with by now. No step says which policy worker is gone: then
            # it is the first, which is asked alone.
            return trainer_lost(outcome.death if isinstance(outcome, WorkerGone) else outcome, 0)
        if isinstance(outcome, WorkerUnresponsive):
            # The same: an engine that is silent is left out.
            return _lost_in_silence(outcome)
        return outcome if isinstance(outcome, Exception) else RefitError(decided.why)

    def _figures(
        self, version: int, outcome: SyncFigures | Exception, seconds: float
    ) -> SyncFigures:
        """Of a sync that is done: also when it failed for an engine that is left out now."""
        if isinstance(outcome, SyncFigures):
            return outcome
        failure = self._synchronizer.last_failure
        loaded = 0 if failure is None else sum(_payload_bytes(failure.engines))
        return SyncFigures(weight_version=version, bytes=loaded, seconds=seconds)


def _lost_in_silence(silent: WorkerUnresponsive) -> TrainerLost:
    lost = TrainerLost(silent.message, remedy=f"{silent.remedy}; {GOES_ON}")
    lost.__cause__ = silent
    return lost


def _payload_bytes(answers: Sequence[object]) -> Iterator[int]:
    for answer in answers:
        if isinstance(answer, WorkerTransfer):
            yield answer.payload_bytes
        elif isinstance(answer, list | tuple):
            yield from _payload_bytes(answer)


def _why(outcome: SyncFigures | Exception) -> str:
    """Why an attempt is followed by another one."""
    return ALL_DIED if isinstance(outcome, SyncFigures) else reason_of(outcome)
