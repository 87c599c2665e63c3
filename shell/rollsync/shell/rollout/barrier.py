"""The barrier between what changes rollout state and what saves it.

Mutations run together; a checkpoint runs alone. It asks every change of the state cell or of the
data plane to happen inside a mutation section, so that a checkpoint sees each transfer of
ownership whole or not at all.

Rules kept here:

1. First come, first served: a checkpoint that waits holds back later mutations, and the mutations
   that waited for one checkpoint all run before the next.
2. A section and a cut are capabilities: they end with their `async with` block, and using one after
   that is an error.
3. A task that is inside does not enter again: it would wait for itself.
4. Leaving never waits, so it cannot be cancelled; a waiter that is cancelled leaves nothing behind.
5. `mutation_version` grows by one when a mutation ends, also when its body raised: what it did
   before raising may have changed something.

One event loop, no threads: between two awaits nothing else runs, and that is the only locking here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

from msgspec import Struct

from rollsync.shell.rollout.errors import BarrierMisuse


class CheckpointMutationKind(StrEnum):
    """What a mutation section does. Telemetry counts by it; some rights depend on it."""

    PROMPT_RESERVATION = "prompt_reservation"
    GROUP_COMMIT = "group_commit"
    GROUP_REMOVAL = "group_removal"
    SAMPLE_CLEAR = "sample_clear"
    SIBLING_SEAL = "sibling_seal"
    ADVANTAGE_WRITE_BACK = "advantage_write_back"
    RECOVERY_RETRY = "recovery_retry"
    RECOVERY_RESTORE = "recovery_restore"
    OTHER = "other"


class DataPlaneCheckpointBarrierTelemetry(Struct, frozen=True, kw_only=True):
    """What happened at the barrier since the last reading."""

    mutations: dict[CheckpointMutationKind, int]
    """Sections that ended, by kind; kinds without any are absent."""
    checkpoints: int
    mutation_wait_s: float
    """Sum over sections of the time between asking and entering."""
    longest_mutation_wait_s: float
    checkpoint_wait_s: float
    """Sum over cuts of the time spent waiting for running mutations."""
    checkpoint_hold_s: float
    longest_checkpoint_hold_s: float


class _Capability:
    """The right to act while a block lasts."""

    def __init__(self, barrier: DataPlaneCheckpointBarrier) -> None:
        self._barrier: DataPlaneCheckpointBarrier | None = barrier

    def require_live(self, barrier: DataPlaneCheckpointBarrier) -> None:
        """Raise `BarrierMisuse` unless the block is still running and is one of `barrier`'s."""
        if self._barrier is None:
            raise BarrierMisuse(
                f"{self._name()} has ended",
                remedy="change rollout state only inside the `async with` block",
            )
        if self._barrier is not barrier:
            raise BarrierMisuse(
                f"{self._name()} belongs to another barrier",
                remedy="use the barrier that the run's parts share",
            )

    def _end(self) -> None:
        self._barrier = None

    def _name(self) -> str:
        return "the section"


class DataPlaneMutationSection(_Capability):
    """The right to change rollout state and rows, while its block lasts."""

    def __init__(self, barrier: DataPlaneCheckpointBarrier, kind: CheckpointMutationKind) -> None:
        super().__init__(barrier)
        self.kind = kind

    def _name(self) -> str:
        return f"the {self.kind} section"


class DataPlaneMutationCut(_Capability):
    """A moment in which no mutation runs, while its block lasts."""

    def __init__(self, barrier: DataPlaneCheckpointBarrier, mutation_version: int) -> None:
        super().__init__(barrier)
        self.mutation_version = mutation_version
        """Number of mutations that ended before the cut."""

    def _name(self) -> str:
        return "the checkpoint's cut"


class _Waiter:
    def __init__(self, exclusive: bool) -> None:
        self.exclusive = exclusive
        self.is_admitted = False
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class DataPlaneCheckpointBarrier:
    """Lets mutations run together and gives a checkpoint the place to itself."""

    def __init__(self) -> None:
        self._running_mutations = 0
        self._cut_is_live = False
        self._waiters: deque[_Waiter] = deque()
        self._inside: set[asyncio.Task[object]] = set()
        self._mutation_version = 0
        self._telemetry = _Counters()

    @property
    def mutation_version(self) -> int:
        """Number of mutations that have ended so far."""
        return self._mutation_version

    @asynccontextmanager
    async def mutation(
        self, kind: CheckpointMutationKind
    ) -> AsyncIterator[DataPlaneMutationSection]:
        """Enter beside other mutations, after any checkpoint that runs or waited first.

        Raises:
            BarrierMisuse: the current task is inside the barrier already.
        """
        task = self._entering_task(f"a {kind} section")
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        await self._admit(exclusive=False)
        self._telemetry.mutation_entered(clock() - asked_s)
        self._inside.add(task)
        section = DataPlaneMutationSection(self, kind)
        try:
            yield section
        finally:
            section._end()
            self._inside.discard(task)
            self._mutation_version += 1
            self._telemetry.mutation_ended(kind)
            self._leave(exclusive=False)

    @asynccontextmanager
    async def checkpoint(self) -> AsyncIterator[DataPlaneMutationCut]:
        """Hold back new mutations, wait for running ones, and have the place alone.

        Raises:
            BarrierMisuse: the current task is inside the barrier already.
        """
        task = self._entering_task("a checkpoint")
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        await self._admit(exclusive=True)
        entered_s = clock()
        self._inside.add(task)
        cut = DataPlaneMutationCut(self, self._mutation_version)
        try:
            yield cut
        finally:
            cut._end()
            self._inside.discard(task)
            self._telemetry.checkpoint_ended(entered_s - asked_s, clock() - entered_s)
            self._leave(exclusive=True)

    def take_telemetry(self) -> DataPlaneCheckpointBarrierTelemetry:
        """What happened since the last call."""
        taken, self._telemetry = self._telemetry, _Counters()
        return taken.value()

    def _entering_task(self, what: str) -> asyncio.Task[object]:
        task = asyncio.current_task()
        if task is None:
            raise BarrierMisuse(
                f"{what} needs an asyncio task", remedy="enter the barrier in a coroutine"
            )
        if task in self._inside:
            raise BarrierMisuse(
                f"this task is inside the barrier already and would wait for itself at {what}",
                remedy="pass the section on instead of entering again",
            )
        return task

    async def _admit(self, *, exclusive: bool) -> None:
        if not self._waiters and self._is_free_for(exclusive):
            self._enter(exclusive)
            return
        waiter = _Waiter(exclusive)
        self._waiters.append(waiter)
        try:
            await waiter.woken
        except BaseException:
            if waiter.is_admitted:
                # Admitted and cancelled in the same turn of the loop: give the place back.
                self._leave(exclusive)
            else:
                self._waiters.remove(waiter)
                self._admit_waiters()
            raise

    def _is_free_for(self, exclusive: bool) -> bool:
        return not self._cut_is_live and not (exclusive and self._running_mutations)

    def _enter(self, exclusive: bool) -> None:
        if exclusive:
            self._cut_is_live = True
        else:
            self._running_mutations += 1

    def _leave(self, exclusive: bool) -> None:
        if exclusive:
            self._cut_is_live = False
        else:
            self._running_mutations -= 1
        self._admit_waiters()

    def _admit_waiters(self) -> None:
        while self._waiters and self._is_free_for(self._waiters[0].exclusive):
            waiter = self._waiters[0]
            if waiter.woken.done():
                # Cancelled. Its task takes itself out of the queue when it runs, and asks again.
                return
            self._waiters.popleft()
            self._enter(waiter.exclusive)
            waiter.is_admitted = True
            waiter.woken.set_result(None)


class _Counters:
    """Telemetry since the last reading."""

    def __init__(self) -> None:
        self._mutations: dict[CheckpointMutationKind, int] = {}
        self._checkpoints = 0
        self._mutation_wait_s = 0.0
        self._longest_mutation_wait_s = 0.0
        self._checkpoint_wait_s = 0.0
        self._checkpoint_hold_s = 0.0
        self._longest_checkpoint_hold_s = 0.0

    def mutation_entered(self, wait_s: float) -> None:
        self._mutation_wait_s += wait_s
        self._longest_mutation_wait_s = max(self._longest_mutation_wait_s, wait_s)

    def mutation_ended(self, kind: CheckpointMutationKind) -> None:
        self._mutations[kind] = self._mutations.get(kind, 0) + 1

    def checkpoint_ended(self, wait_s: float, hold_s: float) -> None:
        self._checkpoints += 1
        self._checkpoint_wait_s += wait_s
        self._checkpoint_hold_s += hold_s
        self._longest_checkpoint_hold_s = max(self._longest_checkpoint_hold_s, hold_s)

    def value(self) -> DataPlaneCheckpointBarrierTelemetry:
        return DataPlaneCheckpointBarrierTelemetry(
            mutations=self._mutations,
            checkpoints=self._checkpoints,
            mutation_wait_s=self._mutation_wait_s,
            longest_mutation_wait_s=self._longest_mutation_wait_s,
            checkpoint_wait_s=self._checkpoint_wait_s,
            checkpoint_hold_s=self._checkpoint_hold_s,
            longest_checkpoint_hold_s=self._longest_checkpoint_hold_s,
        )
