"""`rollsync plan SOURCE`: what a refit of this model will move, hold and take.

Reads a model's published files and asks pure; nothing runs. Needs neither torch nor ray nor vllm.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
from returns.pipeline import is_successful
from returns.result import Result
from rich.table import Table

from rollsync.pure.config import CheckpointEngineConfig
from rollsync.pure.refit import (
    RefitErrorValue,
    Sites,
    describe,
    parse_ratio,
    plan_routes,
    resolve_bucket_bytes,
)
from rollsync.pure.refit.estimate import Links, RefitEstimate, RouteEstimate, estimate_refit
from rollsync.pure.refit.fused_experts import fuse_experts
from rollsync.pure.refit.parallel import Parallelism, Shards, plan_shards, whole_model
from rollsync.shell.cli._console import CommandConsole
from rollsync.shell.cli._model_files import ModelFiles, PlanRefused, read_model
from rollsync.shell.cli._printing import say_json

_RATIO = CheckpointEngineConfig().update_weights_bucket_memory_ratio
"""What a run takes too, if it is told nothing else."""
_GIB = 1024**3
_GB = 1e9
_SLOWEST_GB_PER_S, _FASTEST_GB_PER_S = 1e-6, 1e6
"""Beyond these no link is, and no time that could be told from none or from for ever."""
_SHOWN_ROUTES = 64
_WIDTH = 120

T = TypeVar("T")


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line after parsing, as `--json` repeats it."""

    train_world_size: int
    rollout_world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    whole: bool
    fused_experts: bool
    ratio: float
    memory_gib: float
    link_gb_per_s: float
    host_gb_per_s: float
    workers_per_host: int | None
    shared_hosts: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the source, the two worlds, memory, links, and `--json`."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a Hugging Face config.json, a safetensors index or file, or a model's directory",
    )
    worlds = parser.add_argument_group("workers")
    worlds.add_argument("--train-world", type=_positive, default=1, help="policy workers")
    worlds.add_argument(
        "--rollout-world", type=_positive, help="rollout workers (default: one engine)"
    )
    worlds.add_argument(
        "--tp", type=_positive, default=1, help="tensor-parallel ranks of an engine"
    )
    worlds.add_argument("--pp", type=_positive, default=1, help="pipeline stages of an engine")
    worlds.add_argument("--ep", type=_positive, default=1, help="ranks that share the experts")
    worlds.add_argument(
        "--whole", action="store_true", help="send whole tensors, not each rank's slices"
    )
    worlds.add_argument(
        "--fused-experts",
        action="store_true",
        help="the experts of a layer in two tensors, as transformers 5 has them, not one by one",
    )
    worlds.add_argument(
        "--workers-per-host",
        type=_positive,
        metavar="N",
        help="plan relays for hosts of N workers of one side (default: no host is shared)",
    )
    worlds.add_argument(
        "--shared-hosts", action="store_true", help="both sides count on the same hosts"
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--ratio",
        type=float,
        default=_RATIO,
        help=f"a bucket's share of a worker's memory ({_RATIO:g})",
    )
    memory.add_argument(
        "--memory-gib", type=_memory_gib, default=80.0, help="memory of the smallest worker (80)"
    )
    links = parser.add_argument_group("links")
    links.add_argument(
        "--link-gb-per-s",
        type=_gigabytes_per_s,
        default=50.0,
        help="GB/s of a worker between hosts (50)",
    )
    links.add_argument(
        "--host-gb-per-s",
        type=_gigabytes_per_s,
        help="GB/s inside a host (default: as between hosts)",
    )
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the estimate."""
    source: Path = args.source
    options = _options(args)
    model = read_model(source)
    if options.fused_experts:
        model = msgspec.structs.replace(model, tensors=fuse_experts(model.tensors))
    estimate = _estimate(model, options)
    if args.json:
        document = {
            "read_from": model.read_from,
            "options": msgspec.to_builtins(options),
            "estimate": msgspec.to_builtins(estimate),
        }
        say_json(document)
    else:
        _print(model, options, estimate)
    return 0


def _options(args: argparse.Namespace) -> PlanOptions:
    link: float = args.link_gb_per_s
    host: float | None = args.host_gb_per_s
    rollout: int | None = args.rollout_world
    return PlanOptions(
        train_world_size=args.train_world,
        rollout_world_size=args.tp * args.pp if rollout is None else rollout,
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        expert_parallel=args.ep,
        whole=args.whole,
        fused_experts=args.fused_experts,
        ratio=args.ratio,
        memory_gib=args.memory_gib,
        link_gb_per_s=link,
        host_gb_per_s=link if host is None else host,
        workers_per_host=args.workers_per_host,
        shared_hosts=args.shared_hosts,
    )


def _estimate(model: ModelFiles, options: PlanOptions) -> RefitEstimate:
    memory_bytes = int(options.memory_gib * _GIB)
    bucket_bytes = _checked(
        resolve_bucket_bytes(
            _checked(parse_ratio(options.ratio)),
            policy_memory_bytes=[memory_bytes],
            rollout_memory_bytes=[memory_bytes],
        )
    )
    shards = _shards(model, options)
    sites = _sites(options, shards)
    table = _checked(
        plan_routes(
            options.train_world_size,
            options.rollout_world_size,
            None if options.workers_per_host is None else sites,
        )
    )
    links = Links(
        between_hosts=options.link_gb_per_s * _GB, inside_host=options.host_gb_per_s * _GB
    )
    return _checked(
        estimate_refit(model.tensors, shards, table, sites, bucket_bytes=bucket_bytes, links=links)
    )


def _shards(model: ModelFiles, options: PlanOptions) -> Shards:
    parallelism = Parallelism(
        rollout_world_size=options.rollout_world_size,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
        expert_parallel=options.expert_parallel,
    )
    shards = _checked(plan_shards(model.tensors, parallelism, kv_heads=model.kv_heads))
    return whole_model(model.tensors, options.rollout_world_size) if options.whole else shards


def _sites(options: PlanOptions, shards: Shards) -> Sites:
    per_host = options.workers_per_host or 1
    policy, rollout = ("host", "host") if options.shared_hosts else ("policy", "rollout")
    return Sites(
        policy_hosts=tuple(f"{policy}-{r // per_host}" for r in range(options.train_world_size)),
        rollout_hosts=tuple(
            f"{rollout}-{r // per_host}" for r in range(options.rollout_world_size)
        ),
        rollout_shards=shards.shard_of_rank,
    )


def _print(model: ModelFiles, options: PlanOptions, estimate: RefitEstimate) -> None:
    # Rich takes a pipe for 80 columns, which would break the rows.
    console = CommandConsole(
        file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False
    )
    console.print(_summary(model, options, estimate))
    console.print(_routes(estimate))
    if len(estimate.routes) > _SHOWN_ROUTES:
        more = len(estimate.routes) - _SHOWN_ROUTES
        console.print(f"... and {more} more; --json prints all")


def _summary(model: ModelFiles, options: PlanOptions, estimate: RefitEstimate) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row("model", model.read_from)
    grid.add_row("weights", f"{_size(estimate.parameters_bytes)} in {estimate.tensors:,} tensors")
    largest = estimate.largest
    if largest is not None:
        grid.add_row(
            "largest tensor",
            f"{largest.name}, {_size(largest.tensor_bytes)}, {largest.buckets:.2f} buckets",
        )
    grid.add_row(
        "bucket",
        f"{_size(estimate.bucket_bytes)} ({options.ratio:g} of {options.memory_gib:g} GiB)",
    )
    grid.add_row(
        "memory reserved",
        f"{_size(estimate.reserved_bytes_per_worker)} a worker, "
        f"{_size(estimate.reserved_bytes)} in all",
    )
    idle = len(estimate.idle_policy_ranks)
    grid.add_row(
        "workers",
        f"{options.train_world_size} policy ({idle} send nothing), "
        f"{options.rollout_world_size} rollout",
    )
    padding_bytes = sum(route.padding_bytes for route in estimate.routes)
    grid.add_row("sent", f"{_size(estimate.sent_bytes)}, of that {_size(padding_bytes)} padding")
    grid.add_row("time of the links", f"{estimate.seconds:.3g} s")
    return grid


def _routes(estimate: RefitEstimate) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rollout", "from", "origin", "engine"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tensors", "bytes", "padding", "buckets", "last", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for route in estimate.routes[:_SHOWN_ROUTES]:
        table.add_row(*_row(route))
    return table


def _row(route: RouteEstimate) -> tuple[str, ...]:
    return (
        str(route.rollout_rank),
        f"{route.sender} {route.sender_rank}",
        f"policy {route.policy_rank}",
        route.engine,
        f"{route.tensors:,}",
        _size(route.payload_bytes),
        _size(route.padding_bytes),
        f"{route.buckets:,}",
        _size(route.last_bucket_bytes),
        f"{route.seconds:.3g}",
    )


def _size(size_bytes: int) -> str:
    """Bytes in the largest unit of 1024 that leaves at least 1."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def _checked(result: Result[T, RefitErrorValue]) -> T:
    if not is_successful(result):
        error = result.failure()
        raise PlanRefused(describe(error), error=error)
    return result.unwrap()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _memory_gib(text: str) -> float:
    value = _above_zero(text)
    if value * _GIB == float("inf"):
        raise argparse.ArgumentTypeError(f"{text} GiB are more bytes than can be counted")
    return value


def _gigabytes_per_s(text: str) -> float:
    value = float(text)
    if not _SLOWEST_GB_PER_S <= value <= _FASTEST_GB_PER_S:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {_SLOWEST_GB_PER_S:g} and {_FASTEST_GB_PER_S:g}"
        )
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
