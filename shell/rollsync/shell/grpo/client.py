"""The policy workers of a run as the one trainer that its controller sees.

Rules kept here: a call returns when every worker has answered, and raises when one of them cannot,
with the reason of that one and not of those that waited for it; and after each call that changes
the weights all workers hold the same bits. Whoever holds the client knows the trainer's version
without asking, as of the last answer.
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

    It is used in an `async with`: at its beginning the workers start and meet, at its end they are
    ended.

    Args:
        workers: the actors, by rank.
    """

    def __init__(self, workers: Sequence[ActorProxy[GrpoPolicyWorker]]) -> None:
        self.workers = tuple(workers)
        self.trainer_version = 0

    async def __aenter__(self) -> Self:
        started = await answers_of([each.holding.remote() for each in self.workers])
        self._agree("at the start", started)
        if len(self.workers) > 1:
            # Now that all have started: how long that takes is not for the others' deadline.
            (meeting,) = await answers_of([self.workers[0].open_meeting.remote()])
            await answers_of([each.join.remote(meeting) for each in self.workers])
        return self

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
        metrics = await answers_of(
            [
                worker.compute_gradients.remote([groups[index] for index in share])
                for worker, share in zip(self.workers, shares, strict=True)
            ]
        )
        return metrics[0]

    async def apply_gradients(self) -> None:
        """Take the step."""
        took = await answers_of([each.apply_gradients.remote() for each in self.workers])
        self._agree("after a step", took)

    async def skip_step(self) -> None:
        """Count a step without training."""
        skipped = await answers_of([each.skip_step.remote() for each in self.workers])
        self._agree("after a step", skipped)

    async def save(self, directory: Path) -> None:
        """Have the first worker, which holds what all hold, write the files into `directory`."""
        await answers_of([self.workers[0].save.remote(str(directory))])

    async def load(self, directory: Path) -> None:
        """Become what the checkpoint in `directory` holds."""
        loaded = await answers_of([each.load.remote(str(directory)) for each in self.workers])
        self._agree(f"after loading {directory}", loaded)

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


async def answers_of(calls: Sequence[Awaitable[_T]]) -> list[_T]:
    """What the policy workers answered to a call of each, by rank.

    Raises:
        TrainerLost: one of them is gone; or those that are left say that another does not answer.
        Exception: whatever one of them raised, with a note that names it.
    """
    tasks = [asyncio.ensure_future(_awaited(call)) for call in calls]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        until_s = asyncio.get_running_loop().time() + DEATH_KNOWN_S
        while (failure := _first_failure(tasks)) and isinstance(failure[1], ReplicaUnreachable):
            # Those that waited for it may notice an end sooner than Ray does.
            left_s = until_s - asyncio.get_running_loop().time()
            if not pending or left_s <= 0:
                break
            _, pending = await asyncio.wait(
                pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
        if failure is not None:
            silent = [rank for rank, task in enumerate(tasks) if not task.done()]
            raise _as_loss(*failure, silent)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


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
        who = f"policy worker {', '.join(map(str, silent))} does not answer: " if silent else ""
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
