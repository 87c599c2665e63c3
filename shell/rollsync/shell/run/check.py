"""A refit without a run: the configured workers, made-up weights, and the rate of each route.

Rule kept here: the weights travel the way that a run's would: the same engines' actors, and policy
workers that hold made-up weights of the same model (`SyntheticPolicyWorker`), where the same
placement puts them, through the same checkpoint engine, with the same bucket size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import ray
import torch
from msgspec import Struct
from transformers import AutoConfig, AutoModelForCausalLM

from rollsync.pure.config import MasterConfig
from rollsync.pure.refit import TensorSpec, plan_routes
from rollsync.pure.refit.routes import NOTHING_TO_RELAY, RoutingTable, relayed
from rollsync.shell.config import ConfigError
from rollsync.shell.grpo.replicas import Meeting, Replicas
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.engines.factory import BUILT_IN, check_options
from rollsync.shell.refit.policy_worker import PolicyRefitMixin
from rollsync.shell.refit.report import SyncReport
from rollsync.shell.refit.weights import checkpoint_weights, declare_weights
from rollsync.shell.refit.worker_group import Actor, GenerationGroup, PolicyGroup, call_remote
from rollsync.shell.run.actors import start_engine
from rollsync.shell.run.model_directory import check_model_directory
from rollsync.shell.run.placement import WorkerPlacement, connected, placed_workers
from rollsync.shell.run.synchronizer import make_synchronizer

_SYNCS = 2
"""Of each refit. Only the last is measured: the first also makes connections."""


class RouteRate(Struct, frozen=True, kw_only=True):
    """What one route, or all of them together, have carried."""

    route: str
    """Who sends to whom, and on which nodes they are."""
    carriers: str
    """The checkpoint engine that carries it; with how many routes each, if there are several. Of
    gradients: `gloo`."""
    payload_bytes: int
    seconds: float
    """Of the transfer, without setting it up."""
    gigabytes_per_s: float


class Way(Struct, frozen=True):
    """How the weights come from a policy worker to an engine: the last of these, by way of the
    others."""

    policy_worker: int
    engines: tuple[int, ...]


class SyntheticPolicyWorker(PolicyRefitMixin):
    """A policy worker with random weights of a model's shapes.

    Args:
        config: the run's configuration; of the model only its own is read.
        rank: which of the policy workers it is, from 0.
        workers_on_host: how many workers share this host's memory.
    """

    def __init__(self, config: MasterConfig, *, rank: int, workers_on_host: int) -> None:
        self.refit_rank = rank
        self._workers_on_host = workers_on_host
        shapes = AutoConfig.from_pretrained(config.model.path)
        self._module = AutoModelForCausalLM.from_config(shapes)
        self._version = 0
        self._replicas = Replicas(
            rank=rank,
            world_size=config.grpo.data_parallel_size,
            timeout_s=config.cluster.collective_timeout_s,
        )

    def take_part(self, rank: int, *, version: int) -> None:
        """Have this rank and this version from the next set-up on."""
        self.refit_rank, self._version = rank, version
        self._refit_sender = None

    def open_meeting(self) -> Meeting:
        """Have the first worker wait for the others."""
        return self._replicas.open()

    def join(self, meeting: Meeting) -> None:
        """Meet the other workers."""
        self._replicas.join(meeting)

    def add_up(self) -> tuple[int, float]:
        """Add up as much as a step's gradients are; how many bytes that is, and the seconds."""
        gradients = [torch.zeros_like(weight) for weight in self._module.parameters()]
        began_s = time.perf_counter()
        self._replicas.add_up(gradients)
        return sum(each.nbytes for each in gradients), time.perf_counter() - began_s

    @property
    def workers_on_host(self) -> int:
        """How many workers share this host's memory."""
        return self._workers_on_host

    def weight_version(self) -> int:
        """Made up: one more for each time that it is asked, as if trained in between."""
        self._version += 1
        return self._version

    def iter_refit_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights by their checkpoint names."""
        return checkpoint_weights(self._module)

    def prepare_refit_info(self) -> Mapping[str, TensorSpec]:
        """What `iter_refit_weights` yields."""
        return declare_weights(self._module)


def check_cluster(
    config: MasterConfig, *, note: Callable[[str], None] = lambda _: None
) -> Iterator[RouteRate]:
    """Each route of a run by itself, then all together, then the sum of gradients. Trains nothing,
    and leaves the run directory alone.

    Args:
        note: told where the routes are not what the configuration asks for.

    Raises:
        RollsyncError: the configuration cannot work, the workers cannot be placed, or a refit
            between them fails.
    """
    _check_settings(config)
    with connected(config), placed_workers(config) as placement:
        policy = [_start_policy(config, placement, r) for r in range(_policy_workers(config))]
        slots = range(config.generation.engines)
        engines = [start_engine(config, placement, slot) for slot in slots]
        versions = count(step=_SYNCS)
        for way in ways_of(_routes(config, policy, engines, note)):
            taken = [engines[index] for index in way.engines]
            report = _refit(config, [policy[way.policy_worker]], taken, next(versions))
            yield _rate(_named(placement, way), report, times=len(taken))
        if len(policy) + len(engines) > 2:
            report = _refit(config, policy, engines, next(versions))
            yield _rate("all routes together", report)
        if len(policy) > 1:
            yield _sums(config, policy)


def ways_of(table: RoutingTable) -> tuple[Way, ...]:
    """Every way that a table makes weights come, in the order of the engines. These workers alone
    have the same routes between them."""
    ways: list[Way] = []
    for engine in range(table.rollout_world_size):
        policy_worker, *relays = table.path_to(engine)
        ways.append(Way(policy_worker.rank, (*(relay.rank for relay in relays), engine)))
    return tuple(ways)


def _routes(
    config: MasterConfig,
    policy: Sequence[Actor],
    engines: Sequence[Actor],
    note: Callable[[str], None],
) -> RoutingTable:
    """The routes that a run's syncs take while all its engines are there. Who relays follows from
    the hosts that the workers say they are on, when they are connected."""
    table = plan_routes(len(policy), len(engines)).unwrap()
    settings = config.checkpoint_engine
    if not settings.engine_kwargs.get(settings.backend, {}).get("relay", False):
        return table
    with _connected(config, policy, engines, version=0) as sync:
        chosen = tuple(choice.route for choice in sync.choices)
    if settings.backend in BUILT_IN and not relayed(chosen):
        note(NOTHING_TO_RELAY)
    return RoutingTable(train_world_size=table.train_world_size, routes=chosen or table.routes)


def _check_settings(config: MasterConfig) -> None:
    """Refuse what no worker could work with, before any is started."""
    check_options(config.checkpoint_engine)
    path = config.model.path
    check_model_directory(path)
    try:
        AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: config.json in {path} describes no model: {str(error).splitlines()[0]}",
            remedy="give a directory in Hugging Face's format",
            paths=("model.path",),
        ) from error


def _policy_workers(config: MasterConfig) -> int:
    return config.grpo.data_parallel_size


def _start_policy(config: MasterConfig, placement: WorkerPlacement, rank: int) -> Actor:
    actor = ray.remote(SyntheticPolicyWorker).options(**placement.policy_options(rank))
    on_host = placement.policy_workers_on_host(rank)
    return actor.remote(config, rank=rank, workers_on_host=on_host)


def _sums(config: MasterConfig, policy: Sequence[Actor]) -> RouteRate:
    """The last of `_SYNCS` sums of gradients of all policy workers."""
    (meeting,) = _asked(config, policy[:1], "open_meeting")
    _asked(config, policy, "join", meeting)
    for _ in range(_SYNCS - 1):
        _asked(config, policy, "add_up")
    sums: list[tuple[int, float]] = _asked(config, policy, "add_up")
    payload_bytes, seconds = max(sums)
    return RouteRate(
        route=f"gradients of {len(policy)} policy workers, added up",
        carriers="gloo",
        payload_bytes=payload_bytes,
        seconds=seconds,
        gigabytes_per_s=payload_bytes / seconds / 1e9,
    )


def _asked(
    config: MasterConfig, policy: Sequence[Actor], step: str, *arguments: object
) -> list[Any]:
    """What the policy workers answered to the same call."""
    group = PolicyGroup(policy, step_timeout_s=config.cluster.collective_timeout_s)
    return group.answers([call_remote(worker, step, *arguments) for worker in policy], step)


def _refit(
    config: MasterConfig, policy: Sequence[Actor], engines: Sequence[Actor], version: int
) -> SyncReport:
    """The last of `_SYNCS` syncs between these workers, the first of them at `version` + 1."""
    with _connected(config, policy, engines, version) as sync:
        for _ in range(_SYNCS - 1):
            sync.sync_weights()
        return sync.sync_weights()


@contextmanager
def _connected(
    config: MasterConfig, policy: Sequence[Actor], engines: Sequence[Actor], version: int
) -> Iterator[CheckpointEngineWeightSynchronizer]:
    """Between these workers, the first of which are at `version`."""
    timeout_s = config.cluster.collective_timeout_s
    group = PolicyGroup(policy, step_timeout_s=timeout_s)
    taken = (
        call_remote(worker, "take_part", rank, version=version)
        for rank, worker in enumerate(policy)
    )
    group.answers(list(taken), "take_part")
    sync = make_synchronizer(
        config.checkpoint_engine,
        group,
        GenerationGroup(engines, step_timeout_s=timeout_s),
        step_timeout_s=timeout_s,
    )
    sync.init_communicator()
    try:
        yield sync
    finally:
        sync.shutdown()


def _named(placement: WorkerPlacement, way: Way) -> str:
    *relays, slot = way.engines
    policy, engine = placement.policy_node(way.policy_worker), placement.engine_node(slot)
    relayed = "".join(f", relayed by generation engine {relay}" for relay in relays)
    return (
        f"policy worker {way.policy_worker} (node {policy.node_id[:8]} on {policy.host}) to "
        f"generation engine {slot} (node {engine.node_id[:8]} on {engine.host}){relayed}"
    )


def _rate(route: str, report: SyncReport, *, times: int = 1) -> RouteRate:
    """What was carried, if so many engines loaded it one after the other."""
    payload_bytes = report.payload_bytes // times
    seconds = report.stage_s["transfer"]
    return RouteRate(
        route=route,
        carriers=report.carriers,
        payload_bytes=payload_bytes,
        seconds=seconds,
        gigabytes_per_s=payload_bytes / seconds / 1e9,
    )
