"""Ray actors as the groups that a weight synchronizer drives.

Rule kept here: a group's `workers` has one entry per rank, engine by engine, although an engine's
ranks may live behind one actor, which is then the one that is called.
"""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError

from rollsync.pure.refit.patience import DEFAULT_STEP_TIMEOUT_S, STEP_TIMEOUT
from rollsync.shell.refit.errors import (
    RefitConfigurationError,
    WorkerGone,
    WorkerUnresponsive,
    name_of_engine,
)
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.host_memory import shared_memory_of
from rollsync.shell.refit.remote_waits import wait_for_all

Actor: TypeAlias = object
"""A Ray actor's handle, whose methods are called by name: which class it is of, the caller knows.
(What `ray.remote(Worker).remote()` answers has no one type that says so.)"""

_T = TypeVar("_T")
PREPARE_REFIT_INFO: Final = "prepare_refit_info"
_NO_KWARGS: Mapping[str, object] = MappingProxyType({})


class RayWorkerGroup:
    """Actors that are each the leader of equally many ranks.

    Args:
        leaders: the actors, in rank order.
        ranks_per_leader: how many ranks each of them leads, itself included.
    """

    def __init__(self, leaders: Sequence[Actor], *, ranks_per_leader: int = 1) -> None:
        self.leaders = list(leaders)
        self.workers = [leader for leader in leaders for _ in range(ranks_per_leader)]

    def shared_memories(self) -> list[ObjectRef[object]]:
        """Asks every leader for the `HostMemory` that its ranks share with others."""
        return [call_remote(leader, "__ray_call__", shared_memory_of) for leader in self.leaders]

    def run_all_workers_single_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Sequence[str] = (),
        **kwargs: object,
    ) -> list[ObjectRef[object]]:
        """Runs a method on every leader, each with the same arguments.

        Args:
            method_name: the actors' method.
            run_rank_0_only_axes: taken as said: a leader hands the call on to its ranks itself.
            kwargs: the method's arguments.
        """
        return [call_remote(leader, method_name, **kwargs) for leader in self.leaders]

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        run_rank_0_only_axes: Sequence[str] = (),
        common_kwargs: Mapping[str, object] = _NO_KWARGS,
        **kwargs: object,
    ) -> list[ObjectRef[object]]:
        """Runs a method on every leader, each with its own arguments.

        Args:
            method_name: the actors' method.
            run_rank_0_only_axes: taken as said: a leader hands the call on to its ranks itself.
            common_kwargs: arguments that all leaders get.
            kwargs: by name, a list with one argument per leader.

        Raises:
            RefitConfigurationError: when a list is not as long as there are leaders.
        """
        of_each: list[dict[str, object]] = [dict(common_kwargs) for _ in self.leaders]
        for name, values in kwargs.items():
            if not isinstance(values, list | tuple) or len(values) != len(self.leaders):
                raise RefitConfigurationError(
                    f"{method_name} takes one {name!r} for each of {len(self.leaders)} leaders, "
                    f"and was given {values!r}"
                )
            for arguments, value in zip(of_each, values, strict=True):
                arguments[name] = value
        return [
            call_remote(leader, method_name, **arguments)
            for leader, arguments in zip(self.leaders, of_each, strict=True)
        ]


class PolicyGroup:
    """A policy's workers, one actor per trainer rank, each with `PolicyRefitMixin`.

    Args:
        workers: the actors, by rank.
        step_timeout_s: longest wait for an answer, which may have to wait for the worker's start.
    """

    def __init__(
        self, workers: Sequence[Actor], *, step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S
    ) -> None:
        self.worker_group = RayWorkerGroup(workers)
        self._step_timeout_s = step_timeout_s

    def prepare_refit_info(self) -> object:
        """What the policy will send, as its first worker says.

        Raises:
            WorkerGone, WorkerUnresponsive: it has ended, or does not answer in time.
        """
        ref = call_remote(self.worker_group.leaders[0], PREPARE_REFIT_INFO)
        return self.answers([ref], PREPARE_REFIT_INFO)[0]

    def answers(self, refs: Sequence[ObjectRef[_T]], step: str) -> list[_T]:
        """What the first workers answered to a step; raises as `answers_in_time` does."""
        names = [f"policy worker {rank}" for rank in range(len(refs))]
        return answers_in_time(refs, names, step=step, timeout_s=self._step_timeout_s)


class GenerationGroup:
    """Generation engines, one actor each, as a synchronizer and a rollout see them.

    Args:
        engines: the actors.
        ranks_per_engine: tensor times pipeline parallel ranks of each engine.
        async_engine: whether the actors' methods are coroutines.
        step_timeout_s: longest wait for an answer to `prepare_refit_info`, which may have to wait
            for the engine's start.
    """

    def __init__(
        self,
        engines: Sequence[Actor],
        *,
        ranks_per_engine: int = 1,
        async_engine: bool = True,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        self._ranks_per_engine = ranks_per_engine
        self._step_timeout_s = step_timeout_s
        self.cfg: Mapping[str, object] = {"vllm_cfg": {"async_engine": async_engine}}
        self.use(engines)

    def use(self, engines: Sequence[Actor]) -> None:
        """Consist of these engines from now on. Whoever synchronizes them connects anew."""
        self.worker_group = RayWorkerGroup(engines, ranks_per_leader=self._ranks_per_engine)
        self.dp_size = len(self.worker_group.leaders)
        self._running = [0] * self.dp_size

    def prepare_refit_info(self, refit_info: object) -> None:
        """Tells every engine what the policy will send.

        Raises:
            WorkerGone, WorkerUnresponsive: engines have ended, or do not answer in time.
        """
        leaders = self.worker_group.leaders
        refs = [call_remote(engine, PREPARE_REFIT_INFO, refit_info) for engine in leaders]
        names = [self.name_of(place) for place in range(len(refs))]
        answers_in_time(refs, names, step=PREPARE_REFIT_INFO, timeout_s=self._step_timeout_s)

    def name_of(self, place: int) -> str:
        """What errors call an engine, by its place among them."""
        return name_of_engine(place, self._ranks_per_engine)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        weight_version: int | None = None,
    ) -> list[Completion]:
        """Samples completions on the engine that has least to do; see `GenerationEngine`."""
        # Bound here: the engines may be others when this request ends.
        running = self._running
        chosen = running.index(min(running))
        running[chosen] += 1
        try:
            engine = self.worker_group.leaders[chosen]
            completions: list[Completion] = await call_remote(
                engine,
                "generate",
                prompt_token_ids,
                sampling,
                seed=seed,
                weight_version=weight_version,
            )
            return completions
        finally:
            running[chosen] -= 1

    async def weight_version(self) -> int | None:
        """The version that all engines serve now, None unless all of them serve the same."""
        refs = [call_remote(engine, "weight_version") for engine in self.worker_group.leaders]
        versions: list[int | None] = [await ref for ref in refs]
        return versions[0] if len(set(versions)) == 1 else None


def call_remote(
    actor: Actor, method_name: str, *args: object, **kwargs: object
) -> "ObjectRef[Any]":
    """Calls an actor's method by its name."""
    ref: ObjectRef[Any] = getattr(actor, method_name).remote(*args, **kwargs)
    return ref


def answers_in_time(
    refs: Sequence[ObjectRef[_T]], names: Sequence[str], *, step: str, timeout_s: float
) -> list[_T]:
    """What workers answered.

    Args:
        refs: what each was asked for.
        names: what errors call each.
        step: what errors call that.
        timeout_s: longest wait, which may have to wait for a worker's start.

    Raises:
        WorkerGone, WorkerUnresponsive: one has ended, or some do not answer in time.
        Exception: whatever one raised, as Ray hands it on.
    """
    until_s = time.monotonic() + timeout_s
    busy = wait_for_all(refs, lambda _: until_s)
    answers: list[_T] = []
    for name, ref in zip(names, refs, strict=True):
        if ref not in busy:
            try:
                answers.append(ray.get(ref))
            except RayActorError as death:
                raise WorkerGone([name], death) from death
    if busy:
        raise WorkerUnresponsive(
            [name for name, ref in zip(names, refs, strict=True) if ref in busy],
            f"it has not ended {step} within {timeout_s:g} s, its start included",
            setting=STEP_TIMEOUT,
        )
    return answers
