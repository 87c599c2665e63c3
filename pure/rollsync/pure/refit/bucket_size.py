"""How large a bucket is: a share of the memory of the worker that has least.

Rule kept here: the configured ratio is checked by name before anybody is asked for memory, so that
a typing error costs no remote call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, SupportsInt

from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.pure.refit.errors import (
    BucketSizeError,
    BucketTooSmall,
    MemoryNotANumber,
    MemoryNotPositive,
    NoMemoryReported,
    RatioError,
    RatioNotANumber,
    RatioOutOfRange,
    Side,
)
from rollsync.pure.refit.metadata import flatten_metadata

MEBIBYTE: Final = 1024 * 1024
RATIO_SETTING: Final = "update_weights_bucket_memory_ratio"
"""The name of the ratio in the configuration."""


class HostMemory(Struct, frozen=True):
    """The memory of a host.

    Attributes:
        host: Names the host.
        usable_bytes: What workers on it may use together.
    """

    host: str
    usable_bytes: int


def parse_ratio(value: object) -> Result[float, RatioError]:
    """The configured share of memory that one bucket takes, strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Failure(RatioNotANumber(setting=RATIO_SETTING, value=repr(value)))
    # Compared before the conversion: an int may be too large for a float.
    if not 0 < value < 1:
        shown = float(value) if isinstance(value, float) or abs(value) < 2**1023 else math.inf
        return Failure(RatioOutOfRange(setting=RATIO_SETTING, value=shown))
    return Success(float(value))


def resolve_bucket_bytes(
    ratio: float,
    *,
    policy_memory_bytes: Sequence[int],
    rollout_memory_bytes: Sequence[int],
    share_bytes: int | None = None,
) -> Result[int, BucketSizeError]:
    """The size of a bucket in bytes, a multiple of a MiB.

    Args:
        ratio: The share, from `parse_ratio`.
        policy_memory_bytes: Total memory of every policy worker, by rank.
        rollout_memory_bytes: Total memory of every rollout worker, by rank.
        share_bytes: What no worker has more of, from `smallest_share`, whatever it reports.
    """
    reported: tuple[tuple[Side, Sequence[int]], ...] = (
        ("policy", policy_memory_bytes),
        ("rollout", rollout_memory_bytes),
    )
    totals: list[tuple[int, Side, int]] = []
    for side, side_bytes in reported:
        if not side_bytes:
            return Failure(NoMemoryReported(side=side))
        for worker, total_bytes in enumerate(side_bytes):
            if total_bytes <= 0:
                return Failure(MemoryNotPositive(side=side, worker=worker, total_bytes=total_bytes))
            has_bytes = total_bytes if share_bytes is None else min(total_bytes, share_bytes)
            totals.append((has_bytes, side, worker))
    smallest_bytes, side, worker = min(totals)
    mebibytes = int(smallest_bytes * ratio) // MEBIBYTE
    if mebibytes < 1:
        return Failure(
            BucketTooSmall(
                setting=RATIO_SETTING,
                ratio=ratio,
                side=side,
                worker=worker,
                total_bytes=smallest_bytes,
            )
        )
    return Success(mebibytes * MEBIBYTE)


def reported_memory(
    side: Side, answers: Iterable[object]
) -> Result[tuple[int, ...], MemoryNotANumber]:
    """The total memory of each worker of a side, in bytes.

    Args:
        side: which one.
        answers: of its workers, or of its engines: a number, or one for each rank.
    """
    totals: list[int] = []
    for total in flatten_metadata(answers):
        if not isinstance(total, SupportsInt):
            return Failure(MemoryNotANumber(side=side, reported=repr(total)))
        totals.append(int(total))
    return Success(tuple(totals))


def smallest_share(workers: Iterable[HostMemory | None]) -> int | None:
    """What the workers of the fullest host have each, in bytes; None when none is known to share
    one.

    Args:
        workers: For every worker of either side, where its memory is; None for one that has an
            accelerator's, or of which that is not known.
    """
    sharing = [memory for memory in workers if memory is not None]
    count = Counter(memory.host for memory in sharing)
    return min((memory.usable_bytes // count[memory.host] for memory in sharing), default=None)


def host_memory_share(
    *, host_bytes: int, container_limit_bytes: int | None, workers_on_host: int
) -> int:
    """Total memory that a worker without an accelerator reports: its share of the host's.

    Args:
        host_bytes: Memory of the host.
        container_limit_bytes: What the container may use of it, where there is a limit.
        workers_on_host: How many workers share it, as far as this one knows; at least 1.
    """
    usable_bytes = host_bytes
    if container_limit_bytes is not None:
        usable_bytes = min(host_bytes, container_limit_bytes)
    return usable_bytes // workers_on_host
