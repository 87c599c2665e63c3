"""The figures of one weight synchronization: what moved, how long it took, which version it is.

Workers report their share as a `WorkerTransfer`; `summarize` makes the `SyncReport` of the whole
sync, and `SyncMetrics` hands it to Ray's metrics, which reach Prometheus without further code. Rule
kept here: a worker that is not rollsync's reports nothing, and its sync is summarized all the same.
"""

from collections import Counter as Counted
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from ray.util.metrics import Counter, Gauge

from rollsync.pure.refit import EngineChoice

Role = Literal["policy", "rollout"]


class WorkerTransfer(msgspec.Struct, frozen=True):
    """What one worker sent or loaded in one sync.

    Attributes:
        role: the side it is on.
        rank: its rank on that side.
        weight_version: the trainer version of the weights, None when the stream named none.
        tensors: weights sent or loaded.
        payload_bytes: their bytes.
        batches: loads (rollout side) or 0 (policy side, where the engine batches).
        stage_s: seconds by stage: `send` of a policy worker, `receive`, `load` and `finish` of a
            rollout worker.
        direct_bytes: those of a rollout worker's bytes that were read straight into its parameters.
        buckets: what a rollout worker's stream was cut into, None where its engine does not count.
    """

    role: Role
    rank: int
    weight_version: int | None
    tensors: int
    payload_bytes: int
    batches: int
    stage_s: dict[str, float]
    direct_bytes: int = 0
    buckets: int | None = None


class SyncReport(msgspec.Struct, frozen=True):
    """One successful sync of all engines.

    Attributes:
        backend: the checkpoint engine's name.
        weight_versions: the trainer versions that workers reported; one when all is well, none
            when no worker told.
        tensors: weights of one complete copy of the policy (the largest stream's count).
        payload_bytes: bytes that all rollout workers together received and loaded; where none of
            them tells, those of one complete copy, as the policy's workers count them.
        received_bytes: the same of each of them, in the order of their ranks.
        direct_bytes: those of them that were read straight into parameters, in the same order.
        batches: the largest number of batches that a rollout worker loaded; 0 where none tells.
        buckets: the largest number of buckets that a rollout worker's stream was cut into; None
            where none tells.
        bucket_bytes: size of one transfer buffer, and so of a bucket at most.
        rollout_workers: how many rollout workers reported.
        choices: what carried each route and why, by rollout rank; none if `backend` carried all.
        total_s: from the start of `sync_weights` to its success, set-up included.
        stage_s: seconds by stage, each the slowest worker's: `set_up` and `transfer` as the
            driver saw them, then `send`, `receive`, `load`, `finish` as the workers did.
    """

    backend: str
    weight_versions: tuple[int, ...]
    tensors: int
    payload_bytes: int
    received_bytes: tuple[int, ...]
    direct_bytes: tuple[int, ...]
    batches: int
    buckets: int | None
    bucket_bytes: int
    rollout_workers: int
    choices: tuple[EngineChoice, ...]
    total_s: float
    stage_s: dict[str, float]

    @property
    def weight_version(self) -> int | None:
        """The trainer version that the engines serve now, None when no worker told."""
        return max(self.weight_versions, default=None)

    @property
    def carriers(self) -> str:
        """The engines that carried it, in words, with how many routes each where they differ."""
        carried = Counted(choice.engine for choice in self.choices)
        if len(carried) < 2:
            return next(iter(carried), self.backend)
        return " and ".join(f"{engine} ({carried[engine]})" for engine in sorted(carried))

    @property
    def gigabytes_per_s(self) -> float:
        """`payload_bytes` per second of transfer, in units of 10^9; 0 where no worker told."""
        transfer_s = self.stage_s["transfer"]
        return self.payload_bytes / transfer_s / 1e9 if transfer_s > 0 else 0.0

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in self.stage_s.items())
        version = "unknown" if self.weight_version is None else self.weight_version
        return f"weight version {version} through {self.carriers}: {self._moved} ({stages} s)"

    @property
    def _moved(self) -> str:
        """What moved, in words, as far as the workers told."""
        if not self.payload_bytes:
            return "no worker tells what moved"
        direct = sum(self.direct_bytes)
        directly = f" ({direct} of them read directly)" if direct else ""
        moved = f"{self.tensors} tensors, {self.payload_bytes} bytes{directly}"
        rate = f"{self.gigabytes_per_s:.3f} GB/s"
        if not self.rollout_workers:
            return f"{moved} sent to each engine, of which none tells what it loaded, {rate}"
        buckets = "" if self.buckets is None else f"{self.buckets} buckets and "
        return (
            f"{moved} in {buckets}{self.batches} batches to "
            f"{self.rollout_workers} rollout workers, {rate}"
        )


def summarize(
    results: Iterable[object],
    *,
    backend: str,
    bucket_bytes: int,
    choices: tuple[EngineChoice, ...],
    total_s: float,
    driver_stage_s: Mapping[str, float],
) -> SyncReport:
    """Makes the report of a sync from what its workers answered, whatever else they answered."""
    transfers = list(_transfers(results))
    rollout = sorted((t for t in transfers if t.role == "rollout"), key=lambda t: t.rank)
    stage_s = dict(driver_stage_s)
    for transfer in transfers:
        for stage, seconds in transfer.stage_s.items():
            stage_s[stage] = max(seconds, stage_s.get(stage, 0.0))
    one_copy_bytes = max((t.payload_bytes for t in transfers), default=0)
    versions = {t.weight_version for t in transfers if t.weight_version is not None}
    return SyncReport(
        backend=backend,
        weight_versions=tuple(sorted(versions)),
        tensors=max((t.tensors for t in transfers), default=0),
        payload_bytes=sum(t.payload_bytes for t in rollout) if rollout else one_copy_bytes,
        received_bytes=tuple(t.payload_bytes for t in rollout),
        direct_bytes=tuple(t.direct_bytes for t in rollout),
        batches=max((t.batches for t in rollout), default=0),
        buckets=max((t.buckets for t in rollout if t.buckets is not None), default=None),
        bucket_bytes=bucket_bytes,
        rollout_workers=len(rollout),
        choices=choices,
        total_s=total_s,
        stage_s=stage_s,
    )


def _transfers(results: Iterable[object]) -> Iterable[WorkerTransfer]:
    for result in results:
        if isinstance(result, WorkerTransfer):
            yield result
        elif isinstance(result, list | tuple):
            yield from _transfers(result)


class SyncMetrics:
    """Ray metrics of the syncs of one synchronizer, by backend."""

    def __init__(self) -> None:
        tags = ("backend",)
        self._syncs = Counter("rollsync_refit_syncs", "Weight syncs that succeeded", tags)
        self._failures = Counter("rollsync_refit_failures", "Weight syncs that failed", tags)
        self._bytes = Counter("rollsync_refit_bytes", "Weight bytes that engines loaded", tags)
        self._tensors = Gauge(
            "rollsync_refit_tensors", "Weights of one copy in the last sync", tags
        )
        self._buckets = Gauge(
            "rollsync_refit_buckets", "Buckets of the last sync's longest stream", tags
        )
        self._version = Gauge("rollsync_refit_weight_version", "Weight version served", tags)
        self._rate = Gauge("rollsync_refit_gigabytes_per_s", "Rate of the last sync", tags)
        self._stage = Gauge(
            "rollsync_refit_stage_seconds", "Seconds of the last sync by stage", (*tags, "stage")
        )

    def succeeded(self, report: SyncReport) -> None:
        """Publishes a successful sync, as far as its workers told."""
        tags = {"backend": report.backend}
        self._syncs.inc(1, tags)
        if report.payload_bytes > 0:
            self._bytes.inc(report.payload_bytes, tags)
            self._tensors.set(report.tensors, tags)
            self._rate.set(report.gigabytes_per_s, tags)
        if report.buckets is not None:
            self._buckets.set(report.buckets, tags)
        if report.weight_version is not None:
            self._version.set(report.weight_version, tags)
        for stage, seconds in {**report.stage_s, "total": report.total_s}.items():
            self._stage.set(seconds, {**tags, "stage": stage})

    def failed(self, backend: str) -> None:
        """Publishes a failed sync."""
        self._failures.inc(1, {"backend": backend})
