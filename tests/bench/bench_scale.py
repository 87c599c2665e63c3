"""The pure core at the size of a large cluster: what grows, how, and what that comes to.

No weights, no engines, no network. Refit: 1,000 policy and 4,000 rollout workers with 90,000
tensors. Rollout: a controller with up to 1,000,000 unfinished groups of one sealed sibling. Each
size is measured once more at a tenth, so that the growth shows: a `growth` of 10 is linear.
"""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from returns.pipeline import is_successful

from rollsync.codecs import decode, encode
from rollsync.pure.refit import (
    MEBIBYTE,
    TensorSpec,
    declare,
    plan_buckets,
    plan_digest,
    plan_routes,
    plan_topology,
)
from rollsync.pure.refit.routes import PolicyWorker, RolloutWorker, Sites
from rollsync.pure.rollout.diff import diff
from rollsync.pure.rollout.events import RolloutEvent
from rollsync.pure.rollout.state import RolloutState
from rollsync.pure.rollout.transitions import apply
from tests.bench.bench_codecs import group, state_of
from tests.bench.measure import machine, write_results
from tests.pure.rollout.events_kit import at, reserve

POLICY_WORKERS, ROLLOUT_WORKERS, TENSORS, GROUPS = 1_000, 4_000, 90_000, 1_000_000
WORKERS_PER_HOST = 8
RANKS_PER_ENGINE = 8
EVENTS = 20_000
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it answers, and the least seconds of three goes."""
    best, result = float("inf"), work()
    for _ in range(3):
        gc.collect()
        began_s = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - began_s)
    return result, best


def metadata(side: str, rank: int) -> dict[str, object]:
    """What a worker says of itself: as long as what the built-in engines say."""
    return {
        "backend": "nixl",
        "version": 2,
        "rank": rank,
        "host": f"node-{side}-{rank // WORKERS_PER_HOST:05d}.cluster.example",
        "address": f"[2001:db8::{rank:x}]:{40_000 + rank % 20_000}",
        "secret": f"{rank:064x}",
    }


def refit(policy_workers: int, rollout_workers: int, tensors: int) -> dict[str, object]:
    """Planning times and sizes."""
    policy = [metadata("policy", rank) for rank in range(policy_workers)]
    engines = [
        [metadata("rollout", rank) for rank in range(RANKS_PER_ENGINE)]
        for _ in range(rollout_workers // RANKS_PER_ENGINE)
    ]
    sites = Sites(
        policy_hosts=tuple(f"p{rank // WORKERS_PER_HOST}" for rank in range(policy_workers)),
        rollout_hosts=tuple(f"r{rank // WORKERS_PER_HOST}" for rank in range(rollout_workers)),
        rollout_shards=tuple(rank % RANKS_PER_ENGINE for rank in range(rollout_workers)),
    )
    specs = [
        TensorSpec(f"model.layers.{n // 900}.mlp.experts.{n % 900}.weight", (2048, 768), "bfloat16")
        for n in range(tensors)
    ]
    topology, topology_s = timed(
        lambda: plan_topology(
            policy, engines, train_world_size=policy_workers, rollout_world_size=rollout_workers
        ).unwrap()
    )
    direct, direct_s = timed(lambda: plan_routes(policy_workers, rollout_workers).unwrap())
    relayed, relayed_s = timed(lambda: plan_routes(policy_workers, rollout_workers, sites).unwrap())
    _, one_s = timed(lambda: direct.receivers_of(PolicyWorker(policy_workers // 2)))
    longest, longest_s = timed(
        lambda: max(len(relayed.path_to(rank)) for rank in range(rollout_workers))
    )
    plan, plan_s = timed(lambda: plan_buckets(specs, 64 * MEBIBYTE).unwrap())
    declared, declare_s = timed(lambda: declare(plan))
    _, digest_s = timed(lambda: plan_digest(declared))
    data, encode_s = timed(lambda: encode(declared))
    topology_bytes = len(json.dumps(topology.metadata))
    return {
        "policy_workers": policy_workers,
        "rollout_workers": rollout_workers,
        "tensors": tensors,
        "ms": {
            "order and check the metadata": _ms(topology_s),
            "routes": _ms(direct_s),
            "routes with relays": _ms(relayed_s),
            "one worker's receivers": _ms(one_s),
            "every path": _ms(longest_s),
            "bucket plan": _ms(plan_s),
            "declare": _ms(declare_s),
            "digest": _ms(digest_s),
            "encode the declaration": _ms(encode_s),
        },
        "bytes": {
            "metadata of all, to each worker": topology_bytes,
            "metadata, to all workers": topology_bytes * (policy_workers + rollout_workers),
            "routing table as JSON": len(msgspec.json.encode(relayed)),
            "declaration": len(data),
        },
        "buckets": len(plan.filled_bytes),
        "longest_relay": longest,
        "relays": sum(isinstance(route.sender, RolloutWorker) for route in relayed.routes),
    }


def rollout(groups: int) -> dict[str, object]:
    """A controller's state with so many unfinished groups."""
    before_kib = _rss_kib()
    state = msgspec.structs.replace(
        state_of([group(number, 1) for number in range(groups)]), dataloader_state=at(groups)
    )
    gc.collect()
    state_bytes = (_rss_kib() - before_kib) * 1024
    data, encode_s = timed(lambda: encode(state))
    began_s = time.perf_counter()
    decoded = decode(data, RolloutState)
    decode_s = time.perf_counter() - began_s
    if not is_successful(decoded):
        raise AssertionError("what was encoded is decoded")
    size = len(data)
    del decoded, data
    events = _events(state)
    began_s = time.perf_counter()
    now = state
    for event in events:
        now = apply(now, event).unwrap()
    events_s = time.perf_counter() - began_s
    changes, diff_s = timed(lambda: diff(state, now))
    return {
        "groups": groups,
        "events_a_second": round(len(events) / events_s),
        "state_bytes_a_group": round(state_bytes / groups),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "snapshot_bytes": size,
        "ms": {"encode": _ms(encode_s), "decode": _ms(decode_s), "difference": _ms(diff_s)},
        "difference_bytes": len(encode(changes)),
        "difference_events": len(events),
    }


def _events(state: RolloutState) -> list[RolloutEvent]:
    """New batches are reserved, as the rollout pump does it, beside what is there."""
    first = len(state.ledger.groups)
    return [reserve(first + number, siblings=8) for number in range(EVENTS)]


def _rss_kib() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() // 1024


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


if __name__ == "__main__":
    write_results(
        {
            "machine": machine(["msgspec", "rpds-py", "xxhash"]),
            "refit": [
                refit(POLICY_WORKERS // 10, ROLLOUT_WORKERS // 10, TENSORS // 10),
                refit(POLICY_WORKERS, ROLLOUT_WORKERS, TENSORS),
            ],
            "rollout": [rollout(GROUPS // 100), rollout(GROUPS // 10), rollout(GROUPS)],
        }
    )
