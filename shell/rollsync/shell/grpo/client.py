"""The policy workers of a run as the one trainer that its controller sees.

Rules kept here: a call returns when every worker has answered, and raises when one of them cannot,
with the reason of that one and not of those that waited for it; one that is silent is waited for
until a deadline; and after each call that changes the weights all workers hold the same bits.
Whoever holds the client knows the trainer's version without asking, as of the last answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayActorError

from rollsync.pure.rollout.shares import share_groups
from rollsync.shell.actor_deaths import failed_to_start, reason_of_death
from rollsync.shell.errors import RollsyncError
from rollsync.shell.grpo.replicas import ReplicaUnreachable
from rollsync.shell.grpo.trainer import StepMetrics, TrainingRow
from rollsync.shell.grpo.worker import GrpoPolicyWorker, Holding
from rollsync.shell.rollout.clients import TrainerLost, trainer_lost

DEATH_KNOWN_S: Final = 10.0
"""How much later than its peers' complaints the end of a worker may become known."""

_T = TypeVar("_T")


class TrainerNotStarted(RollsyncError):
    """A policy worker could not be made, for a reason that the next start will meet again."""


class ReplicasDiverged(RollsyncError):
    """The policy workers of a run, replicas of one model, do not hold the same weights."""


class GrpoTrainerClient:
    """The controller's trainer: see `rollsync.shell.rollout.clients.TrainerClient`.

    It is used in an `async with`, at whose end the workers are ended; `start` comes first. The
    workers do the same work, so what one has done the others have to do within `timeout_s` more;
    a step is taken, or counted, within `timeout_s`. How long the first of them may compute, load or
    save, which is all that a single worker does, is for the caller to say.

    Args:
        workers: the actors, by rank.
        timeout_s: longest wait for a worker that should have answered.
    """

    def __init__(
        self, workers: Sequence[ActorProxy[GrpoPolicyWorker]], *, timeout_s: float
    ) -> None:
        self.workers = tuple(workers)
        self.trainer_version = 0
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def start(self) -> None:
        """Wait until the workers have started, and have them meet.

        Raises:
            TrainerNotStarted: one of them could not be made.
        """
        started = await self._same_work([each.holding.remote() for each in self.workers])
        self._agree("at the start", started)
        if len(self.workers) > 1:
            # Now that all have started: how long that takes is not for the others' deadline.
            (meeting,) = await self._quick_work([self.workers[0].open_meeting.remote()])
            await self._same_work([each.join.remote(meeting) for each in self.workers])

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self.workers:
            # After a failure some may wait for one another, and would go on to.
            if isinstance(worker, ActorHandle):
                ray.kill(worker)

    async def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        """The gradients of one step, each worker's share of it added up."""
        shares = share_groups(len(groups), len(self.workers))
        metrics = await self._same_work(
            [
                worker.compute_gradients.remote([groups[index] for index in share])
                for worker, share in zip(self.workers, shares, strict=True)
            ]
        )
        return metrics[0]

    async def apply_gradients(self) -> None:
        """Take the step."""
        took = await self._quick_work([each.apply_gradients.remote() for each in self.workers])
        self._agree("after a step", took)

    async def skip_step(self) -> None:
        """Count a step without training."""
        skipped = await self._quick_work([each.skip_step.remote() for each in self.workers])
        self._agree("after a step", skipped)

    async def save(self, directory: Path) -> None:
        """Have the first worker, which holds what all hold, write the files into `directory`. How
        long that may take is what the caller waits."""
        await self._same_work([self.workers[0].save.remote(str(directory))])

    async def load(self, directory: Path) -> None:
        """Become what the checkpoint in `directory` holds."""
        loaded = await self._same_work([each.load.remote(str(directory)) for each in self.workers])
        self._agree(f"after loading {directory}", loaded)

    async def _same_work(self, calls: Sequence[Awaitable[_T]]) -> list[_T]:
        return await answers_of(calls, timeout_s=self._timeout_s, runs_from_start=False)

    async def _quick_work(self, calls: Sequence[Awaitable[_T]]) -> list[_T]:
        return await answers_of(calls, timeout_s=self._timeout_s, runs_from_start=True)

    def _agree(self, when: str, holdings: Sequence[Holding]) -> None:
        """Take the version from what all workers hold.

        Raises:
            ReplicasDiverged: they do not hold the same.
        """
        if len(set(holdings)) > 1:
            each = "; ".join(
                f"policy worker {rank}: version {holding.trainer_version}, weights"
                f" {holding.weights_digest}"
                for rank, holding in enumerate(holdings)
            )
            raise ReplicasDiverged(
                f"{when} the policy workers do not hold the same weights: {each}",
                remedy="see that model.path and run.directory are the same files on the nodes of"
                " all policy workers, and torch and the kind of machine too; the same command goes"
                " on from the last save",
            )
        self.trainer_version = holdings[0].trainer_version


async def answers_of(
    calls: Sequence[Awaitable[_T]], *, timeout_s: float, runs_from_start: bool
) -> list[_T]:
    """What the policy workers answered to a call of each, by rank.

    Args:
        calls: one for each worker.
        timeout_s: longest wait for an answer.
        runs_from_start: whether that time runs from now on. False: from the first answer on, for
            which there is no deadline.

    Raises:
        TrainerLost: one of them is gone, or has not answered in time; or those that are left say
            that another does not answer.
        Exception: whatever one of them raised, with a note that names it.
    """
    tasks = [asyncio.ensure_future(_awaited(call)) for call in calls]
    try:
        if not runs_from_start:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        await _wait_for_culprit(tasks)
        silent = [rank for rank, task in enumerate(tasks) if not task.done()]
        if (failure := _first_failure(tasks)) is not None:
            raise _as_loss(*failure, silent)
        if silent:
            since = "" if runs_from_start else " after another had done the same"
            raise _lost_in_silence(silent, f"nothing came from it within {timeout_s:g} s{since}")
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _wait_for_culprit(tasks: Sequence[asyncio.Task[_T]]) -> None:
    """Wait a little for the failure of whom the others have waited for in vain, if they have:
    they may notice an end sooner than Ray does."""
    until_s = asyncio.get_running_loop().time() + DEATH_KNOWN_S
    while (failure := _first_failure(tasks)) and isinstance(failure[1], ReplicaUnreachable):
        pending = [task for task in tasks if not task.done()]
        left_s = until_s - asyncio.get_running_loop().time()
        if not pending or left_s <= 0:
            break
        await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def _lost_in_silence(silent: Sequence[int], how: str) -> TrainerLost:
    return TrainerLost(
        f"{_named(silent)} does not answer: {how}",
        remedy="see whether its process is halted or stuck, and Ray's log of it; raise"
        " cluster.collective_timeout_s only if it was merely slow; the same command goes on from"
        " the last save",
    )


def _named(ranks: Sequence[int]) -> str:
    return f"policy worker {', '.join(map(str, ranks))}"


async def _awaited(call: Awaitable[_T]) -> _T:
    return await call


def _first_failure(tasks: Sequence[asyncio.Task[_T]]) -> tuple[int, BaseException] | None:
    """The rank and the error of a worker that failed, rather by itself than for another."""
    failures = [
        (rank, error)
        for rank, task in enumerate(tasks)
        if task.done() and (error := task.exception()) is not None
    ]
    failures.sort(key=lambda failure: isinstance(failure[1], ReplicaUnreachable))
    return failures[0] if failures else None


def _as_loss(rank: int, error: BaseException, silent: Sequence[int]) -> BaseException:
    if isinstance(error, RayActorError):
        return _not_started(error, rank) if failed_to_start(error) else trainer_lost(error, rank)
    if isinstance(error, ReplicaUnreachable):
        who = f"{_named(silent)} does not answer: " if silent else ""
        lost = TrainerLost(f"{who}{error.message}", remedy=error.remedy)
        lost.__cause__ = error
        return lost
    error.add_note(f"on policy worker {rank}")
    return error


def _not_started(error: RayActorError, rank: int) -> TrainerNotStarted:
    failed = TrainerNotStarted(
        f"policy worker {rank} did not start: {reason_of_death(error)}",
        remedy="correct what the reason names; on a cluster, model.path and all packages have to be"
        " on the node of every policy worker",
    )
    failed.__cause__ = error
    return failed
