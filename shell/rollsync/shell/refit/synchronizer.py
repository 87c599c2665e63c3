"""Drives a checkpoint engine's life cycle on a policy's and a generation's workers.

The steps and their order are fixed: memory of every worker, `init_checkpoint_engine`,
`prepare_checkpoint_engine`, `init_checkpoint_engine_process_group`, then per sync a send together
with an update, and at the end `finalize_checkpoint_engine`. Rules kept here: policy references
come first in every list that is waited for; nothing but the phases above is called, so that
offloading and waking stay the caller's; and a sync that did not reach every engine raises.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import ray
from ray import ObjectRef

from rollsync.pure.refit import MEBIBYTE, EngineChoice, parse_ratio, resolve_bucket_bytes
from rollsync.pure.refit.blame import refused
from rollsync.pure.refit.bucket_size import (
    RATIO_SETTING,
    HostMemory,
    reported_memory,
    smallest_share,
)
from rollsync.pure.refit.metadata import rank_prefixes, topology_of_answers
from rollsync.pure.refit.patience import DEFAULT_STEP_TIMEOUT_S, parse_timeout, refit_timeout
from rollsync.pure.refit.routes import NOTHING_TO_RELAY, choices_among, relayed
from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit.configuration import check_configuration, note_unread
from rollsync.shell.refit.engines.factory import BUILT_IN
from rollsync.shell.refit.errors import WeightTransferFailed, WorkerGone, accepted
from rollsync.shell.refit.interfaces import (
    CheckpointEngineConfig,
    RefitGeneration,
    RefitPolicy,
    Timer,
    WeightSynchronizer,
)
from rollsync.shell.refit.report import SyncMetrics, SyncReport, summarize
from rollsync.shell.refit.step_failure import WorkerAnswers
from rollsync.shell.refit.step_waiting import NOTICED_S, RunningStep
from rollsync.shell.refit.worker_group import RayWorkerGroup, call_remote

logger = logging.getLogger(__name__)

SYNC_LABEL = "prepare_for_generation/transfer_and_update_weights"
"""The timer's label of the transfer, as NeMo-RL's dashboards know it."""

RANK_0_AXES = ["tensor_parallel", "pipeline_parallel"]
"""One call per generation engine: its rank 0 hands the call on inside the engine."""


@dataclass
class CheckpointEngineWeightSynchronizer(WeightSynchronizer):
    """Moves a policy's weights into its generation engines through a checkpoint engine.

    Both sides are driven by shape (see `interfaces`): NeMo-RL's policy and generation objects fit
    as they are, and so do rollsync's worker groups. What their own `prepare_refit_info` waits for
    is theirs to bound; everything else has a deadline here.
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
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S
    """Longest wait for a step that moves no weights. The first may find workers still starting."""
    last_failure: WorkerAnswers | None = field(default=None, repr=False, compare=False)
    """How the last step that failed ended on each worker; None when every step went well."""

    def init_communicator(self) -> None:
        """Tells the generation what will come, and connects both sides.

        Raises:
            RefitConfigurationError: what the configuration asks for, there is not.
            WorkerGone, WorkerUnresponsive: a worker has ended, or does not answer in time.
        """
        self._check_settings()
        config = self._checkpoint_engine_config
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
        """True until a sync has succeeded, from `mark_stale` on, and from the start of a sync until
        its success."""
        return self._stale

    def mark_stale(self) -> None:
        """Notes that the policy has moved."""
        self._stale = True

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
            WorkerUnresponsive: when a worker has not ended a step in time.
            Exception: whatever else a worker raised, as Ray hands it on.
        """
        self._stale = True
        self.last_failure = None
        self._check_settings()
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
        policy_refs = self._run_policy(Step.FINALIZE)
        generation_refs = self._run_generation(Step.FINALIZE)
        policies = len(policy_refs)
        busy = frozenset[int]() if self.last_failure is None else self.last_failure.silent
        self._answers(
            Step.FINALIZE,
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
            # A plain one, which is all that somebody else's workers may be able to read.
            checkpoint_method=str(checkpoint_method),
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
            checkpoint_method=str(checkpoint_method),
            method_args=method_args,
            run_rank_0_only_axes=RANK_0_AXES,
        )

    def _resolve_bucket_size_bytes(self) -> int:
        if self._bucket_size_bytes is not None:
            return self._bucket_size_bytes
        ratio = accepted(parse_ratio(self._checkpoint_engine_config.get(RATIO_SETTING)))
        policy_refs = self._run_policy(Step.MEASURE)
        totals = self._answers(Step.MEASURE, policy_refs, self._run_generation(Step.MEASURE))
        policies = len(policy_refs)
        bucket_size_bytes = accepted(
            resolve_bucket_bytes(
                ratio,
                policy_memory_bytes=accepted(reported_memory("policy", totals[:policies])),
                rollout_memory_bytes=accepted(reported_memory("rollout", totals[policies:])),
                share_bytes=self._smallest_share(),
            )
        )
        self._bucket_size_bytes = bucket_size_bytes
        logger.info("%d MiB per transfer buffer", bucket_size_bytes // MEBIBYTE)
        return bucket_size_bytes

    def _smallest_share(self) -> int | None:
        """What the workers of the fullest host have of its memory each, as far as it can be known:
        somebody else's workers tell their own number only."""
        policy, generation = self._policy.worker_group, self._generation.worker_group
        policy_refs = policy.shared_memories() if isinstance(policy, RayWorkerGroup) else []
        engine_refs = generation.shared_memories() if isinstance(generation, RayWorkerGroup) else []
        if not (policy_refs or engine_refs):
            return None
        memories = self._answers(Step.MEASURE, policy_refs, engine_refs)
        ranks = [1] * len(policy_refs) + [self._ranks_per_engine()] * len(engine_refs)
        return smallest_share(
            memory if isinstance(memory, HostMemory) else None
            for memory, of_it in zip(memories, ranks, strict=True)
            for _ in range(of_it)
        )

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
            Step.MAKE,
            self._run_policy(
                Step.MAKE,
                backend=backend,
                bucket_size_bytes=bucket_size_bytes,
                engine_kwargs=engine_kwargs,
            ),
            self._run_generation(Step.MAKE, (backend, bucket_size_bytes, engine_kwargs)),
        )
        policy_refs = self._run_policy(Step.PREPARE)
        prepared = self._answers(Step.PREPARE, policy_refs, self._run_generation(Step.PREPARE))
        connected = self._connect(prepared, policies=len(policy_refs))
        self._choices = choices_among(connected[: len(policy_refs)])
        for choice in self._choices:
            logger.info("%s", choice)
        asked = backend in BUILT_IN and engine_kwargs.get("relay", False)
        if asked and not relayed(choice.route for choice in self._choices):
            logger.info(NOTHING_TO_RELAY)

    def _connect(self, prepared: Sequence[object], *, policies: int) -> list[object]:
        """Connects all by what they have prepared; their answers, policy first."""
        workers = len(self._generation.worker_group.workers)
        topology = accepted(
            topology_of_answers(prepared[:policies], prepared[policies:], rollout_workers=workers)
        )
        metadata = list(topology.metadata)
        train, rollout = topology.train_world_size, topology.rollout_world_size
        prefixes = rank_prefixes(rollout_workers=workers, engines=self._generation.dp_size)
        return self._answers(
            Step.CONNECT,
            self._run_policy(
                Step.CONNECT, metadata=metadata, train_world_size=train, rollout_world_size=rollout
            ),
            self._generation.worker_group.run_all_workers_multiple_data(
                self._generation_rpc(),
                method_args=[(prefix, train, rollout, metadata) for prefix in accepted(prefixes)],
                run_rank_0_only_axes=RANK_0_AXES,
                common_kwargs={"checkpoint_method": str(Step.CONNECT)},
            ),
        )

    def _ranks_per_engine(self) -> int:
        group = self._generation
        return max(1, len(group.worker_group.workers) // max(1, group.dp_size))

    def _transfer(self, kv_scales: dict[str, float] | None) -> list[object]:
        """One send and one update on all workers; their answers, policy first."""
        policy_refs = self._run_policy(Step.TRANSFER, kv_scales=kv_scales)
        generation_refs = self._run_generation(UPDATE)
        results = self._answers(Step.TRANSFER, policy_refs, generation_refs)
        updates = results[len(policy_refs) :]
        if places := refused(updates):
            self.last_failure = WorkerAnswers(
                policy=tuple(results[: len(policy_refs)]),
                engines=tuple(False if i in places else u for i, u in enumerate(updates)),
                ranks_per_engine=self._ranks_per_engine(),
            )
            backend = self._checkpoint_engine_config["backend"]
            raise WeightTransferFailed(
                f"Weight transfer failed during {backend} checkpoint-engine sync: engines "
                f"{list(places)} did not load it",
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
                remedy="synchronize when all policy workers have finished the same step; until then"
                " each engine serves the version that it was sent",
            )

    def _answers(
        self,
        step: Step,
        policy_refs: Sequence[ObjectRef[object]],
        generation_refs: Sequence[ObjectRef[object]],
    ) -> list[object]:
        """What the workers answered to a step, policy first.

        Raises:
            Exception: why it failed, when it has ended on every worker or has been waited for as
                long as it may take (`limit_of`); `last_failure` says how.
        """
        set_up = self._checkpoint_engine_ready or self._partly_set_up
        running = RunningStep(
            step=step,
            policy=policy_refs,
            engines=generation_refs,
            ranks_per_engine=self._ranks_per_engine(),
            refit_timeout_s=accepted(refit_timeout(self._engine_options())),
            step_timeout_s=self.step_timeout_s,
        )
        finalize = partial(self._finalize_failed, policies=len(policy_refs)) if set_up else None
        late = running.wait()
        if late is not None and (silent := late.unresponsive) is not None:
            raise self._noted(late, silent)
        try:
            return list(ray.get([*policy_refs, *generation_refs]))
        except Exception as first:
            cause = self._noted(running.wait_out(finalize), first)
            raise cause from cause.__cause__

    def _noted(self, failure: WorkerAnswers, first: Exception) -> Exception:
        """Why a step failed, which is in `last_failure` from now on."""
        self.last_failure = failure
        return failure.cause(first)

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
            refs.append(call_remote(worker, rpc, checkpoint_method=str(Step.FINALIZE)))
        # One that fails at this too is finalized again with the others.
        ray.wait(refs, num_returns=len(refs), timeout=NOTICED_S)

    def _check_settings(self) -> None:
        has_size = self._bucket_size_bytes is not None
        check_configuration(self._checkpoint_engine_config, needs_ratio=not has_size)
        accepted(parse_timeout("step_timeout_s", self.step_timeout_s))

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
