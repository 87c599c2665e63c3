"""`rollsync plan SOURCE`: what a refit of this model will move, hold and take.

Reads a model's published files and asks pure; nothing runs. Needs neither torch nor ray nor vllm.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from returns.pipeline import is_successful
from returns.result import Result
from rich.table import Table

from rollsync.pure.config import CheckpointEngineConfig
from rollsync.pure.refit import (
    RefitErrorValue,
    describe,
    parse_ratio,
    resolve_bucket_bytes,
)
from rollsync.pure.refit import errors as e
from rollsync.pure.refit.deployment import Deployment, plan_refit
from rollsync.pure.refit.estimate import Links, RefitEstimate, RouteEstimate
from rollsync.pure.refit.fused_experts import fuse_experts
from rollsync.pure.refit.parallel import Parallelism
from rollsync.shell.cli._console import CommandConsole
from rollsync.shell.cli._model_files import ModelFiles, PlanRefused, read_model
from rollsync.shell.cli._printing import say_json

_RATIO = CheckpointEngineConfig().update_weights_bucket_memory_ratio
"""What a run takes too, if it is told nothing else."""
_GIB = 1024**3
_GB = 1e9
_SLOWEST_GB_PER_S, _FASTEST_GB_PER_S = 1e-6, 1e6
"""Beyond these no link is, and no time that could be told from none or from for ever."""
_LEAST_MEMORY_GIB, _MOST_MEMORY_GIB = 1e-6, 1e6
_SHOWN_ROWS = 64
_SHOWN_RANGES = 3
_WIDTH = 140
_LARGEST_SIZE = 10**9
"""Of a group of workers: what is larger is a slip, whatever it is multiplied with."""

_WORLD = "--rollout-world, --tp and --pp"
_OPTIONS: Final[Mapping[type[RefitErrorValue], str]] = {
    e.RatioOutOfRange: "--ratio",
    e.BucketTooSmall: "--ratio and --memory-gib",
    e.TooManyLayouts: "--memory-gib, --ratio, --train-world and --tp",
    e.WorldNotDivisible: _WORLD,
    e.ExpertGroupsUneven: "--ep, --tp and --rollout-world",
    e.HeadsNotDivisible: "--tp",
    e.DimensionNotDivisible: "--tp",
    e.TooFewLayers: "--pp",
    e.TooFewExperts: "--ep",
}
"""What to change about an error."""
_OPTIONS_OF_MOST: Final[Mapping[e.Planned, str]] = {
    "policy workers": "--train-world",
    "rollout workers": _WORLD,
    "parts": "--tp and --ep",
}

_T = TypeVar("_T")


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
        "--rollout-world",
        type=_positive,
        help="rollout workers (default: as few as --tp, --pp and --ep need)",
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
        help="plan relays for hosts of N workers of one side "
        "(default: no relays, each worker on a host of its own)",
    )
    worlds.add_argument(
        "--shared-hosts", action="store_true", help="both sides count on the same hosts"
    )
    _add_resources(parser)
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")


def _add_resources(parser: argparse.ArgumentParser) -> None:
    """What the workers have: memory and links."""
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
        rollout_world_size=math.lcm(args.tp, args.ep) * args.pp if rollout is None else rollout,
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
    deployment = Deployment(
        train_world_size=options.train_world_size,
        engines=Parallelism(
            rollout_world_size=options.rollout_world_size,
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel,
            expert_parallel=options.expert_parallel,
        ),
        whole=options.whole,
        workers_per_host=options.workers_per_host,
        shared_hosts=options.shared_hosts,
    )
    links = Links(
        between_hosts=options.link_gb_per_s * _GB, inside_host=options.host_gb_per_s * _GB
    )
    return _checked(
        plan_refit(
            model.tensors, model.attention, deployment, bucket_bytes=bucket_bytes, links=links
        )
    )


def _print(model: ModelFiles, options: PlanOptions, estimate: RefitEstimate) -> None:
    # Rich takes a pipe for 80 columns; in these, or a narrow terminal's, it would cut figures off.
    console = CommandConsole(file=sys.stdout, width=_WIDTH, highlight=False)
    console.print(_summary(model, options, estimate))
    rows = [list(alike) for _, alike in groupby(estimate.routes, key=_figures)]
    console.print(_routes(rows[:_SHOWN_ROWS]))
    if len(rows) > _SHOWN_ROWS:
        console.print(f"... and {len(rows) - _SHOWN_ROWS} more rows; --json prints all routes")
    for note in _notes(options, estimate):
        console.print(note)


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
        f"{_size(estimate.reserved_bytes_per_worker)} a worker that sends, or reads from another "
        f"host; {_size(estimate.reserved_bytes)} in all",
    )
    assembly = estimate.assembly_bytes_per_receiver
    if assembly:
        grid.add_row("", f"{_size(assembly)} a receiver, for what its two buckets cannot hold")
    idle = len(estimate.idle_policy_ranks)
    grid.add_row(
        "workers",
        f"{options.train_world_size} policy ({idle} send nothing), "
        f"{options.rollout_world_size} rollout{_groups(options)}",
    )
    padding_bytes = sum(route.padding_bytes for route in estimate.routes)
    grid.add_row(
        "sent",
        f"{_size(estimate.sent_bytes)}, of that {_size(padding_bytes)} padding; "
        f"at most {_size(estimate.most_sent_bytes)} by one worker",
    )
    grid.add_row("time of the links", f"{estimate.seconds:.3g} s")
    return grid


def _groups(options: PlanOptions) -> str:
    sizes = {
        "tensor": options.tensor_parallel,
        "pipeline": options.pipeline_parallel,
        "expert": options.expert_parallel,
    }
    groups = ", ".join(f"{what}-parallel {size}" for what, size in sizes.items() if size > 1)
    return f" ({groups})" if groups else ""


def _figures(route: RouteEstimate) -> RouteEstimate:
    """The same for all routes that differ in who they are between, and not in what they carry."""
    return msgspec.structs.replace(route, rollout_rank=0, sender_rank=0, policy_rank=0, shard=0)


def _routes(rows: Iterable[list[RouteEstimate]]) -> Table:
    """Neighbours whose figures are the same share a row."""
    table = Table(box=None, pad_edge=False)
    for heading in ("rollout", "from", "origin", "over"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tensors", "parts", "bytes", "padding", "bucket", "buckets", "last", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for alike in rows:
        table.add_row(*_row(alike))
    return table


def _row(alike: list[RouteEstimate]) -> tuple[str, ...]:
    route = alike[0]
    return (
        _ranks(each.rollout_rank for each in alike),
        f"{route.sender} {_ranks(each.sender_rank for each in alike)}",
        f"policy {_ranks(each.policy_rank for each in alike)}",
        route.engine,
        f"{route.tensors:,}",
        f"{route.parts:,}",
        _size(route.payload_bytes),
        _size(route.padding_bytes),
        _size(route.bucket_bytes),
        f"{route.buckets:,}",
        _size(route.last_bucket_bytes),
        f"{route.seconds:.3g}",
    )


def _ranks(ranks: Iterable[int]) -> str:
    """`0-7` for all of 0 to 7; `0-3,8` where some are missing."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if ranges and ranges[-1][1] + 1 == rank:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
    return ",".join(shown[:_SHOWN_RANGES] + ["..."] * (len(shown) > _SHOWN_RANGES))


def _notes(options: PlanOptions, estimate: RefitEstimate) -> Iterable[str]:
    yield "parts: whole tensors, and slices of those that a worker keeps a slice of"
    yield "over: what `auto` takes, shm inside a host and nixl between hosts"
    yield "last: how far the last bucket is filled; the others are full"
    if any(route.bucket_bytes < estimate.bucket_bytes for route in estimate.routes):
        yield "A policy worker divides its buckets among the different layouts that it sends."
    if any(route.sent_whole for route in estimate.routes):
        yield (
            "Workers that relay to each other keep different experts, so they are all sent whole "
            "tensors: do not relay."
        )
    elif not options.whole and len({route.shard for route in estimate.routes}) > 1:
        yield (
            "A first sync, in which the engines show what they keep, sends whole tensors: see "
            "--whole."
        )


def _size(size_bytes: int) -> str:
    """Bytes in the largest unit of 1024 that leaves at least 1."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def _checked(result: Result[_T, RefitErrorValue]) -> _T:
    if not is_successful(result):
        error = result.failure()
        options = _OPTIONS.get(type(error))
        if isinstance(error, e.BeyondPlanning):
            options = _OPTIONS_OF_MOST.get(error.what)
        remedy = "" if options is None else f"change {options}"
        raise PlanRefused(describe(error), remedy=remedy, error=error)
    return result.unwrap()


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= _LARGEST_SIZE:
        raise argparse.ArgumentTypeError(
            f"{text[:20]!r} is no whole number from 1 to {_LARGEST_SIZE}"
        )
    return value


def _memory_gib(text: str) -> float:
    return _number(text, _LEAST_MEMORY_GIB, _MOST_MEMORY_GIB)


def _gigabytes_per_s(text: str) -> float:
    return _number(text, _SLOWEST_GB_PER_S, _FASTEST_GB_PER_S)


def _number(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not between {least:g} and {most:g}")
    return value
