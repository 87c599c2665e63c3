"""Drives a checkpoint engine's life cycle on a policy's and a generation's workers.

The steps and their order are fixed: memory of every worker, `init_checkpoint_engine`,
`prepare_checkpoint_engine`, `init_checkpoint_engine_process_group`, then per sync a send together
with an update, and at the end `finalize_checkpoint_engine`. Rules kept here: policy references
come first in every list that is waited for; nothing but the phases above is called, so that
offloading and waking stay the caller's; and a sync that did not reach every engine raises.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import SupportsInt, cast

import ray
from ray import ObjectRef

from rollsync.pure.refit import (
    MEBIBYTE,
    EngineChoice,
    Topology,
    flatten_metadata,
    parse_ratio,
    plan_topology,
    resolve_bucket_bytes,
)
from rollsync.pure.refit.routes import NOTHING_TO_RELAY, relayed
from rollsync.shell.refit.configuration import check_configuration, note_unread
from rollsync.shell.refit.engines.factory import BUILT_IN
from rollsync.shell.refit.errors import (
    RefitConfigurationError,
    WeightTransferFailed,
    WorkerGone,
    accepted,
)
from rollsync.shell.refit.interfaces import (
    CheckpointEngineConfig,
    RefitGeneration,
    RefitPolicy,
    Timer,
    WeightSynchronizer,
)
from rollsync.shell.refit.report import SyncMetrics, SyncReport, summarize
from rollsync.shell.refit.step_failure import NOTICED_S, WorkerAnswers, settle
from rollsync.shell.refit.worker_group import call_remote

logger = logging.getLogger(__name__)

SYNC_LABEL = "prepare_for_generation/transfer_and_update_weights"
"""The timer's label of the transfer, as NeMo-RL's dashboards know it."""

RANK_0_AXES = ["tensor_parallel", "pipeline_parallel"]
"""One call per generation engine: its rank 0 hands the call on inside the engine."""

DEFAULT_REFIT_TIMEOUT_S = 300.0
"""How long a failed sync waits for the workers that have not answered yet, if not configured."""


@dataclass
class CheckpointEngineWeightSynchronizer(WeightSynchronizer):
    """Moves a policy's weights into its generation engines through a checkpoint engine.

    Both sides are driven by shape (see `interfaces`): NeMo-RL's policy and generation objects fit
    as they are, and so do rollsync's worker groups.
    """

    _policy: RefitPolicy
    _generation: RefitGeneration
    _checkpoint_engine_config: CheckpointEngineConfig
    _stale: bool = True
    _checkpoint_engine_ready: bool = False
    _bucket_size_bytes: int | None = None
    _partly_set_up: bool = field(default=False, repr=False, compare=False)
    """Whether some workers may hold what a set-up reserved, and others not: never while ready."""
    _choices: tuple[EngineChoice, ...] = field(default=(), repr=False, compare=False)
    """What carries each route, where the backend chooses."""
    _metrics: SyncMetrics = field(default_factory=SyncMetrics, repr=False, compare=False)
    last_failure: WorkerAnswers | None = field(default=None, repr=False, compare=False)
    """How the last step that failed ended on each worker; None when every step went well."""

    def init_communicator(self) -> None:
        """Tells the generation what will come, and connects both sides.

        Raises:
            RefitConfigurationError: what the configuration asks for, there is not.
        """
        config = self._checkpoint_engine_config
        check_configuration(config)
        note_unread(config["backend"], config["engine_kwargs"])
        self.last_failure = None
        self._generation.prepare_refit_info(self._policy.prepare_refit_info())
        self._ensure_checkpoint_engine_ready()

    def reconnect(self) -> None:
        """Connects anew when other engines are there than before. What is left of an earlier
        connection, on whichever worker, is given back first."""
        self.last_failure = None
        self._finalize()
        self.init_communicator()

    @property
    def choices(self) -> tuple[EngineChoice, ...]:
        """Each route of those who were connected last and what carries it, in the order of the
        rollout ranks; none from a backend that neither chooses nor relays."""
        return self._choices

    @property
    def is_stale(self) -> bool:
        """True until a sync has succeeded, and from the start of a sync until its success."""
        return self._stale

    def sync_weights(
        self, *, timer: Timer | None = None, kv_scales: dict[str, float] | None = None
    ) -> SyncReport:
        """Moves the policy's weights into every engine.

        Args:
            timer: times the transfer under `SYNC_LABEL` when given.
            kv_scales: key/value cache scales by name, sent after the weights.

        Returns:
            The sync's figures, which are also logged and published as Ray metrics.

        Raises:
            RefitConfigurationError: when the set-up, where one is needed, was refused.
            WeightTransferFailed: when an engine answered that it did not load the weights, or
                when workers moved to different versions.
            WorkerGone: when the process of a worker has ended.
            Exception: whatever else a worker raised, as Ray hands it on.
        """
        self._stale = True
        self.last_failure = None
        check_configuration(self._checkpoint_engine_config)
        started_s = time.perf_counter()
        backend = self._checkpoint_engine_config["backend"]
        try:
            self._ensure_checkpoint_engine_ready()
            ready_s = time.perf_counter()
            with timer.time(SYNC_LABEL) if timer is not None else nullcontext():
                results = self._transfer(kv_scales)
            done_s = time.perf_counter()
            report = summarize(
                results,
                backend=backend,
                bucket_bytes=self._resolve_bucket_size_bytes(),
                choices=self._choices,
                total_s=done_s - started_s,
                driver_stage_s={"set_up": ready_s - started_s, "transfer": done_s - ready_s},
            )
            self._check_versions(report)
            self._stale = False
        except BaseException as error:
            self._metrics.failed(backend)
            if self._release_after_refit() or self._partly_set_up:
                self._shutdown_beside(error)
            raise
        self._metrics.succeeded(report)
        logger.info("synchronized %s", report)
        if self._release_after_refit():
            self.shutdown()
        return report

    def shutdown(self) -> None:
        """Finalizes the checkpoint engine on every worker that lives; without a set-up, does
        nothing. What a worker held whose process is gone went with it, and is no failure."""
        if not (self._checkpoint_engine_ready or self._partly_set_up):
            return
        before = self.last_failure
        try:
            self._finalize()
        except WorkerGone as gone:
            alive = () if self.last_failure is None else self.last_failure.failed_alive
            if alive:
                raise alive[0] from gone
            logger.warning("shut down without a worker: %s", gone.message)
            self.last_failure = before

    def _finalize(self) -> None:
        """Finalizes the checkpoint engine on every worker. One that is busy with the step that
        failed last does it when it comes to it, and is not waited for."""
        # The set-up counts as gone even if a worker fails to release: the next sync prepares anew.
        self._checkpoint_engine_ready = False
        self._partly_set_up = False
        policy_refs = self._run_policy("finalize_checkpoint_engine")
        generation_refs = self._run_generation("finalize_checkpoint_engine")
        policies = len(policy_refs)
        busy = frozenset[int]() if self.last_failure is None else self.last_failure.silent
        self._answers(
            [ref for place, ref in enumerate(policy_refs) if place not in busy],
            [ref for place, ref in enumerate(generation_refs, policies) if place not in busy],
        )

    def _release_after_refit(self) -> bool:
        return bool(self._engine_options().get("release_after_refit", False))

    def _run_policy(
        self, checkpoint_method: str, **method_kwargs: object
    ) -> list[ObjectRef[object]]:
        return self._policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc",
            checkpoint_method=checkpoint_method,
            method_kwargs=method_kwargs,
        )

    def _generation_rpc(self) -> str:
        vllm_cfg = cast("dict[str, object]", self._generation.cfg["vllm_cfg"])
        return (
            "checkpoint_engine_rpc_async" if vllm_cfg["async_engine"] else "checkpoint_engine_rpc"
        )

    def _run_generation(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> list[ObjectRef[object]]:
        return self._generation.worker_group.run_all_workers_single_data(
            self._generation_rpc(),
            checkpoint_method=checkpoint_method,
            method_args=method_args,
            run_rank_0_only_axes=RANK_0_AXES,
        )

    def _resolve_bucket_size_bytes(self) -> int:
        if self._bucket_size_bytes is not None:
            return self._bucket_size_bytes
        setting = self._checkpoint_engine_config.get("update_weights_bucket_memory_ratio")
        ratio = accepted(parse_ratio(setting))
        policy_refs = self._run_policy("checkpoint_engine_total_memory_bytes")
        totals = self._answers(
            policy_refs, self._run_generation("checkpoint_engine_total_memory_bytes")
        )
        bucket_size_bytes = accepted(
            resolve_bucket_bytes(
                ratio,
                policy_memory_bytes=_integers(totals[: len(policy_refs)]),
                rollout_memory_bytes=_integers(totals[len(policy_refs) :]),
            )
        )
        self._bucket_size_bytes = bucket_size_bytes
        logger.info("%d MiB per transfer buffer", bucket_size_bytes // MEBIBYTE)
        return bucket_size_bytes

    def _ensure_checkpoint_engine_ready(self) -> None:
        if self._checkpoint_engine_ready:
            return
        bucket_size_bytes = self._resolve_bucket_size_bytes()
        self._partly_set_up = True
        try:
            self._set_up(bucket_size_bytes)
        except BaseException as error:
            # Some workers may hold buffers by now; without this only their end would free them.
            self._shutdown_beside(error)
            raise
        self._checkpoint_engine_ready = True
        self._partly_set_up = False

    def _set_up(self, bucket_size_bytes: int) -> None:
        backend = self._checkpoint_engine_config["backend"]
        engine_kwargs = self._engine_options()
        self._answers(
            self._run_policy(
                "init_checkpoint_engine",
                backend=backend,
                bucket_size_bytes=bucket_size_bytes,
                engine_kwargs=engine_kwargs,
            ),
            self._run_generation(
                "init_checkpoint_engine", (backend, bucket_size_bytes, engine_kwargs)
            ),
        )
        policy_refs = self._run_policy("prepare_checkpoint_engine")
        generation_refs = self._run_generation("prepare_checkpoint_engine")
        prepared = self._answers(policy_refs, generation_refs)
        topology = self._topology(prepared[: len(policy_refs)], prepared[len(policy_refs) :])
        metadata = list(topology.metadata)
        train_world_size = topology.train_world_size
        rollout_world_size = topology.rollout_world_size
        policy_refs = self._run_policy(
            "init_checkpoint_engine_process_group",
            metadata=metadata,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
        )
        connected = self._answers(
            policy_refs,
            self._generation.worker_group.run_all_workers_multiple_data(
                self._generation_rpc(),
                method_args=[
                    (rank_prefix, train_world_size, rollout_world_size, metadata)
                    for rank_prefix in self._rank_prefixes()
                ],
                run_rank_0_only_axes=RANK_0_AXES,
                common_kwargs={"checkpoint_method": "init_checkpoint_engine_process_group"},
            ),
        )
        self._choices = _choices(connected[: len(policy_refs)])
        for choice in self._choices:
            logger.info("%s", choice)
        asked = backend in BUILT_IN and engine_kwargs.get("relay", False)
        if asked and not relayed(choice.route for choice in self._choices):
            logger.info(NOTHING_TO_RELAY)

    def _topology(self, policy: list[object], generation: list[object]) -> Topology:
        answered = flatten_metadata(generation)
        # Metadata without ranks is opaque: then who answered is all there is to know.
        ranked = any(isinstance(item, Mapping) and "rank" in item for item in answered)
        workers = len(self._generation.worker_group.workers)
        return accepted(
            plan_topology(
                policy,
                generation,
                train_world_size=len(flatten_metadata(policy)),
                rollout_world_size=workers if ranked else len(answered),
            )
        )

    def _rank_prefixes(self) -> range:
        """The first global rollout rank of each engine."""
        workers = len(self._generation.worker_group.workers)
        engines = self._generation.dp_size
        if engines < 1 or workers < 1 or workers % engines:
            raise RefitConfigurationError(
                f"{workers} rollout workers cannot be shared evenly by {engines} engines",
                remedy="give every data-parallel engine equally many workers",
            )
        return range(0, workers, workers // engines)

    def _ranks_per_engine(self) -> int:
        group = self._generation
        return max(1, len(group.worker_group.workers) // max(1, group.dp_size))

    def _transfer(self, kv_scales: dict[str, float] | None) -> list[object]:
        """One send and one update on all workers; their answers, policy first."""
        policy_refs = self._run_policy("send_weights_via_checkpoint_engine", kv_scales=kv_scales)
        generation_refs = self._run_generation("update_weights_from_checkpoint_engine")
        results = self._answers(policy_refs, generation_refs)
        updates = results[len(policy_refs) :]
        if not all(update for update in updates if update is not None):
            backend = self._checkpoint_engine_config["backend"]
            refused = [i for i, u in enumerate(updates) if u is not None and not u]
            self.last_failure = WorkerAnswers(
                policy=tuple(results[: len(policy_refs)]),
                engines=tuple(False if i in refused else u for i, u in enumerate(updates)),
                ranks_per_engine=self._ranks_per_engine(),
            )
            raise WeightTransferFailed(
                f"Weight transfer failed during {backend} checkpoint-engine sync: engines "
                f"{refused} did not load it",
                backend=backend,
                remedy="see those engines' logs; they refuse to generate until a sync succeeds",
            )
        return results

    def _check_versions(self, report: SyncReport) -> None:
        if len(report.weight_versions) > 1:
            raise WeightTransferFailed(
                f"the workers of one sync were at the weight versions "
                f"{', '.join(map(str, report.weight_versions))}",
                backend=report.backend,
                remedy="synchronize when all policy workers have finished the same step",
            )

    def _answers(
        self, policy_refs: Sequence[ObjectRef[object]], generation_refs: Sequence[ObjectRef[object]]
    ) -> list[object]:
        """What the workers answered to a step, policy first.

        Raises:
            Exception: why it failed, when it has ended on every worker, or has not for
                `refit_timeout_s`; `last_failure` says how.
        """
        try:
            return list(ray.get([*policy_refs, *generation_refs]))
        except Exception as first:
            failure = settle(
                policy_refs,
                generation_refs,
                ranks_per_engine=self._ranks_per_engine(),
                timeout_s=self._patience_s(),
                finalize_failed=partial(self._finalize_failed, policies=len(policy_refs))
                if self._checkpoint_engine_ready or self._partly_set_up
                else None,
            )
            self.last_failure = failure
            cause = failure.cause(first)
            raise cause from cause.__cause__

    def _patience_s(self) -> float:
        """How long a failed step is waited for; not at all would make every worker that has not
        answered yet look stuck, however wrong the option is that the failure may be about."""
        timeout_s = self._engine_options().get("refit_timeout_s")
        if isinstance(timeout_s, int | float) and timeout_s > 0:
            return timeout_s
        return DEFAULT_REFIT_TIMEOUT_S

    def _finalize_failed(self, places: Sequence[int], *, policies: int) -> None:
        """Finalizes the checkpoint engine of some workers only: those that wait for them notice.

        Args:
            places: of the workers, policy first.
            policies: how many of the policy's workers a step runs on.
        """
        self._checkpoint_engine_ready = False
        self._partly_set_up = True
        ranks = self._generation.worker_group.workers
        refs: list[ObjectRef[object]] = []
        for place in places:
            if place < policies:
                worker, rpc = self._policy.worker_group.workers[place], "checkpoint_engine_rpc"
            else:
                leader = (place - policies) * self._ranks_per_engine()
                worker, rpc = ranks[leader], self._generation_rpc()
            refs.append(call_remote(worker, rpc, checkpoint_method="finalize_checkpoint_engine"))
        # One that fails at this too is finalized again with the others.
        ray.wait(refs, num_returns=len(refs), timeout=NOTICED_S)

    def _engine_options(self) -> dict[str, object]:
        config = self._checkpoint_engine_config
        return dict(config["engine_kwargs"].get(config["backend"], {}))

    def _shutdown_beside(self, error: BaseException) -> None:
        """Shuts down while `error` is on its way, without ever hiding it."""
        failure = self.last_failure
        try:
            self.shutdown()
        except Exception as second:
            self.last_failure = failure
            error.add_note(f"finalizing the checkpoint engine failed as well: {second!r}")


def _choices(connected: Iterable[object]) -> tuple[EngineChoice, ...]:
    """What carries each route, in the order of the rollout ranks, from the policy workers whose
    engine chooses."""
    each = (choice for worker in connected if isinstance(worker, tuple) for choice in worker)
    choices = (choice for choice in each if isinstance(choice, EngineChoice))
    return tuple(sorted(choices, key=lambda choice: choice.route.receiver.rank))


def _integers(results: Iterable[object]) -> list[int]:
    """The memory totals of one side, in bytes."""
    totals = []
    for total in flatten_metadata(results):
        if not isinstance(total, SupportsInt):
            raise RefitConfigurationError(
                f"a worker reported its total memory as {total!r}",
                remedy="answer checkpoint_engine_total_memory_bytes with a number of bytes",
            )
        totals.append(int(total))
    return totals
