"""What follows from the state of a fleet: who serves, who syncs, what is started, and what a failed
sync means.

Rule kept here: a lost fleet serves and syncs nothing more; all that is left to do is to save.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from rollsync.pure.refit.fleet.events import (
    ActorDied,
    EngineSynced,
    EngineSyncFailed,
    ProbeMissed,
)
from rollsync.pure.refit.fleet.state import (
    EnginePhase,
    FleetState,
    replacements_left,
)
from rollsync.pure.refit.lifecycle import EngineState, Poisoned, Serving

_TAKES_PART = frozenset({EnginePhase.OUTDATED, EnginePhase.HEALTHY, EnginePhase.POISONED})


class SyncUnfinished(Struct, frozen=True):
    """Some engines of the sync have not ended yet."""


class SyncDone(Struct, frozen=True):
    """Every living engine that was in the sync serves its version, but for those to blame."""

    version: int


class RetrySync(Struct, frozen=True):
    """The sync is to be tried again with these engines."""

    version: int
    engines: tuple[str, ...]


class EnginesAwaited(Struct, frozen=True):
    """The sync failed because of engines, and there is none to try it with again: another one
    begins when there is."""


class SyncGivenUp(Struct, frozen=True):
    """The sync failed, and no engine can be left out that would help."""

    why: str


AfterSync = SyncUnfinished | SyncDone | RetrySync | EnginesAwaited | SyncGivenUp


def may_serve(state: FleetState, weight_version: int) -> tuple[str, ...]:
    """The engines that may answer a request with the weights of `weight_version`."""
    if state.lost is not None:
        return ()
    return tuple(
        sorted(
            name
            for name, record in state.engines.items()
            if record.phase is EnginePhase.HEALTHY and record.version == weight_version
        )
    )


def takes_part(state: FleetState) -> tuple[str, ...]:
    """The engines of the next sync: all that answer. A suspect is not waited for; it syncs when it
    answers again. In the order of their start, so that ranks stay as they are."""
    if state.lost is not None:
        return ()
    return tuple(name for name in state.started if state.engines[name].phase in _TAKES_PART)


def awaits_sync(state: FleetState) -> bool:
    """Whether an engine answers and lacks the weights that the others serve: a replacement, or one
    that came back. It should get them before the next training step is done."""
    if state.target_version is None or state.sync is not None or state.lost is not None:
        return False
    waiting = (EnginePhase.OUTDATED, EnginePhase.POISONED)
    return any(record.phase in waiting for record in state.engines.values())


def may_sync(state: FleetState) -> bool:
    """Whether a sync can begin: before the first one the whole fleet is waited for."""
    if state.target_version is None and any(
        record.phase is EnginePhase.JOINING for record in state.engines.values()
    ):
        return False
    return bool(takes_part(state))


def replacements_wanted(state: FleetState) -> int:
    """How many engines to start now."""
    if state.lost is not None:
        return 0
    living = sum(record.phase is not EnginePhase.DEAD for record in state.engines.values())
    return max(0, min(state.wanted - living, replacements_left(state)))


def free_slot(state: FleetState, slots: Mapping[str, int]) -> int:
    """The slot of an engine that is started now: the first that no other has, but for dead ones.

    Args:
        state: the fleet, fewer of whose engines live than it wants.
        slots: of each engine, by name.
    """
    taken = {
        slots[name]
        for name, record in state.engines.items()
        if record.phase is not EnginePhase.DEAD
    }
    return next(slot for slot in range(state.wanted) if slot not in taken)


def after_failed_attempt(
    engine: str,
    version: int,
    *,
    died: str | None,
    missed: ProbeMissed | ActorDied | None,
    state: EngineState | None,
    to_blame: bool,
    why: str,
) -> ActorDied | EngineSynced | EngineSyncFailed:
    """What a failed attempt means for an engine that took part.

    It may have all weights nevertheless, as an attempt can fail after some engines had them.

    Args:
        engine: its name.
        version: of the attempt.
        died: how its process ended, if its part of the attempt ended so.
        missed: what its probe afterwards came to, when it did not answer.
        state: what it said of its weights last; None if it never did.
        to_blame: whether the attempt failed because of it.
        why: why the attempt failed, as far as the engine does not say it.
    """
    if isinstance(missed, ActorDied):
        return missed
    if died is not None:
        return ActorDied(engine, died)
    if missed is not None:
        return EngineSyncFailed(engine, "it did not answer after it", own=True)
    if isinstance(state, Serving) and state.version == version:
        return EngineSynced(engine)
    cause = state.cause if isinstance(state, Poisoned) else why
    return EngineSyncFailed(engine, cause, own=to_blame)


def after_sync(state: FleetState, *, trainer_lost: bool = False) -> AfterSync:
    """What the outcomes of the sync under way mean.

    A sync is tried again without the engine because of which it failed: once for each, so that it
    ends. When nobody in the fleet is to blame, trying again would not help.

    Args:
        state: the fleet.
        trainer_lost: whether a policy worker is gone, or stuck.
    """
    sync = state.sync
    if sync is None:
        return SyncGivenUp("no sync is under way")
    phases = {name: state.engines[name].phase for name in sync.engines}
    if EnginePhase.SYNCING in phases.values():
        return SyncUnfinished()
    if state.lost is not None:
        return SyncGivenUp("too few engines are left")
    lacking = [
        name
        for name, phase in phases.items()
        if phase is not EnginePhase.DEAD and state.engines[name].version != sync.version
    ]
    synced = [name for name in sync.engines if state.engines[name].version == sync.version]
    # One that was dropped for its own failure waits for the next sync: the others go on.
    if synced and all(name in sync.blamed for name in lacking):
        return SyncDone(sync.version)
    if trainer_lost:
        return SyncGivenUp("a policy worker is lost")
    if not any(name in sync.blamed for name in sync.engines):
        causes = "; ".join(f"{name}: {state.engines[name].cause}" for name in lacking)
        return SyncGivenUp(f"no engine is to blame ({causes})")
    engines = tuple(name for name in takes_part(state) if name not in sync.blamed)
    return RetrySync(sync.version, engines) if engines else EnginesAwaited()
