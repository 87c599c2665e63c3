"""A refit without a run: the configured workers, made-up weights, and the rate of each route.

Rule kept here: the weights travel the way that a run's would: the same actors where the same
placement puts them, the same engine, the same bucket size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import ray
import torch
from msgspec import Struct
from transformers import AutoConfig, AutoModelForCausalLM

from rollsync.pure.config import MasterConfig
from rollsync.pure.refit import TensorSpec
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.policy_worker import PolicyRefitMixin
from rollsync.shell.refit.report import SyncReport
from rollsync.shell.refit.weights import checkpoint_weights, declare_weights
from rollsync.shell.refit.worker_group import Actor, GenerationGroup, PolicyGroup
from rollsync.shell.run.actors import start_engine
from rollsync.shell.run.placement import WorkerPlacement, connected, placed_workers


class RouteRate(Struct, frozen=True, kw_only=True):
    """What one route, or all of them together, have carried."""

    route: str
    """Who sends to whom, and on which nodes they are."""
    carriers: str
    """The checkpoint engine that carries it; with how many routes each, if there are several."""
    payload_bytes: int
    seconds: float
    """Of the transfer, without setting it up."""
    gigabytes_per_s: float


class SyntheticPolicyWorker(PolicyRefitMixin):
    """A policy worker with random weights of a model's shapes.

    Args:
        model: path of the model, of which only the configuration is read.
        workers_on_host: how many workers share this host's memory.
    """

    def __init__(self, model: str, *, workers_on_host: int) -> None:
        self._workers_on_host = workers_on_host
        self._module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        self._version = 0

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


def check_cluster(config: MasterConfig) -> Iterator[RouteRate]:
    """Each route by itself, then all together. Trains nothing, and leaves the run directory alone.

    Raises:
        RollsyncError: the workers cannot be placed, or a refit between them fails.
    """
    with connected(config), placed_workers(config) as placement:
        policy = (
            ray.remote(SyntheticPolicyWorker)
            .options(**placement.policy_options())
            .remote(config.model.path, workers_on_host=placement.policy_workers_on_host)
        )
        engines = [start_engine(config, placement, i) for i in range(config.generation.engines)]
        for index, engine in enumerate(engines):
            yield _rate(_route(placement, index), _refit(config, policy, [engine]))
        if len(engines) > 1:
            yield _rate("all routes together", _refit(config, policy, engines))


def _refit(config: MasterConfig, policy: Actor, engines: Sequence[Actor]) -> SyncReport:
    """The second of two syncs: the first also makes connections and touches memory."""
    settings = config.checkpoint_engine
    sync = CheckpointEngineWeightSynchronizer(
        PolicyGroup([policy]),
        GenerationGroup(engines),
        {
            "backend": settings.backend,
            "update_weights_bucket_memory_ratio": settings.update_weights_bucket_memory_ratio,
            "engine_kwargs": settings.engine_kwargs,
        },
    )
    sync.init_communicator()
    try:
        sync.sync_weights()
        return sync.sync_weights()
    finally:
        sync.shutdown()


def _route(placement: WorkerPlacement, index: int) -> str:
    policy, engine = placement.policy_node, placement.engine_node(index)
    return (
        f"policy worker 0 (node {policy.node_id[:8]} on {policy.host}) to generation engine "
        f"{index} (node {engine.node_id[:8]} on {engine.host})"
    )


def _rate(route: str, report: SyncReport) -> RouteRate:
    return RouteRate(
        route=route,
        carriers=report.carriers,
        payload_bytes=report.payload_bytes,
        seconds=report.stage_s["transfer"],
        gigabytes_per_s=report.gigabytes_per_s,
    )
