"""The size of a bucket, from a ratio and the memory of every worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import (
    MEBIBYTE,
    describe,
    host_memory_share,
    parse_ratio,
    resolve_bucket_bytes,
)
from rollsync.pure.refit.bucket_size import HostMemory, reported_memory, smallest_share
from rollsync.pure.refit.errors import (
    BucketTooSmall,
    MemoryNotANumber,
    MemoryNotPositive,
    NoMemoryReported,
    RatioNotANumber,
    RatioOutOfRange,
)

MEMORIES = st.lists(st.integers(1, 2**45), min_size=1, max_size=5)
RATIOS = st.floats(0, 1, exclude_min=True, exclude_max=True)


@given(RATIOS)
def test_a_ratio_strictly_between_0_and_1_is_taken_as_it_is(ratio: float) -> None:
    assert parse_ratio(ratio).unwrap() == ratio


@pytest.mark.parametrize(
    "value", [0, 1, 0.0, 1.0, -0.1, 1.5, float("inf"), float("-inf"), float("nan"), 2, 10**400]
)
def test_a_ratio_out_of_range_is_refused_by_name(value: float) -> None:
    error = parse_ratio(value).failure()
    assert isinstance(error, RatioOutOfRange)
    assert "update_weights_bucket_memory_ratio" in describe(error)


@pytest.mark.parametrize("value", [None, "0.1", True, False, [0.1], {}, 0.1j])
def test_a_ratio_that_is_no_number_is_refused_by_name(value: object) -> None:
    error = parse_ratio(value).failure()
    assert error == RatioNotANumber(setting="update_weights_bucket_memory_ratio", value=repr(value))
    assert error.setting in describe(error)
    assert repr(value) in describe(error)


@given(RATIOS, MEMORIES, MEMORIES)
def test_a_bucket_is_the_share_of_the_smallest_worker_floored_to_a_mebibyte(
    ratio: float, policy: list[int], rollout: list[int]
) -> None:
    share = int(min(policy + rollout) * ratio)
    result = resolve_bucket_bytes(ratio, policy_memory_bytes=policy, rollout_memory_bytes=rollout)
    if share < MEBIBYTE:
        error = result.failure()
        assert isinstance(error, BucketTooSmall)
        totals = policy if error.side == "policy" else rollout
        assert totals[error.worker] == error.total_bytes == min(policy + rollout)
        assert f"worker {error.worker}" in describe(error)
    else:
        bucket_bytes = result.unwrap()
        assert bucket_bytes % MEBIBYTE == 0
        assert share - MEBIBYTE < bucket_bytes <= share


def test_a_known_case() -> None:
    resolved = resolve_bucket_bytes(
        0.02, policy_memory_bytes=[80 << 30, 80 << 30], rollout_memory_bytes=[141 << 30]
    )
    assert resolved.unwrap() == 1638 * MEBIBYTE


def test_exactly_one_mebibyte_is_enough() -> None:
    resolved = resolve_bucket_bytes(
        0.5, policy_memory_bytes=[2 * MEBIBYTE], rollout_memory_bytes=[3 * MEBIBYTE]
    )
    assert resolved.unwrap() == MEBIBYTE
    too_small = resolve_bucket_bytes(
        0.5, policy_memory_bytes=[3 * MEBIBYTE], rollout_memory_bytes=[2 * MEBIBYTE - 1]
    )
    assert isinstance(too_small.failure(), BucketTooSmall)


def test_each_side_must_report() -> None:
    nobody = resolve_bucket_bytes(0.5, policy_memory_bytes=[], rollout_memory_bytes=[1 << 30])
    assert nobody.failure() == NoMemoryReported(side="policy")
    nobody = resolve_bucket_bytes(0.5, policy_memory_bytes=[1 << 30], rollout_memory_bytes=[])
    assert nobody.failure() == NoMemoryReported(side="rollout")
    assert "rollout" in describe(nobody.failure())


@pytest.mark.parametrize("total_bytes", [0, -1])
def test_a_worker_without_memory_is_named(total_bytes: int) -> None:
    error = resolve_bucket_bytes(
        0.5, policy_memory_bytes=[1 << 30], rollout_memory_bytes=[1 << 30, total_bytes]
    ).failure()
    assert error == MemoryNotPositive(side="rollout", worker=1, total_bytes=total_bytes)
    assert "rollout worker 1" in describe(error)


@given(st.integers(1, 2**45), st.none() | st.integers(1, 2**45), st.integers(1, 64))
def test_workers_of_a_host_share_what_the_container_may_use(
    host_bytes: int, limit_bytes: int | None, workers: int
) -> None:
    share = host_memory_share(
        host_bytes=host_bytes, container_limit_bytes=limit_bytes, workers_on_host=workers
    )
    usable = host_bytes if limit_bytes is None else min(host_bytes, limit_bytes)
    assert 0 <= usable - share * workers < workers


@given(st.lists(st.none() | st.builds(HostMemory, st.sampled_from("ab"), st.integers(1, 2**45))))
def test_a_share_leaves_room_for_everybody_on_each_host(workers: list[HostMemory | None]) -> None:
    share = smallest_share(workers)
    sharing = [worker for worker in workers if worker is not None]
    assert (share is None) == (not sharing)
    for worker in sharing:
        together = sum(other.host == worker.host for other in sharing)
        assert share is not None
        assert share * together <= worker.usable_bytes


def test_workers_that_each_report_the_host_s_memory_are_given_their_share_of_it() -> None:
    memory = HostMemory("one", 800 * MEBIBYTE)
    share = smallest_share([memory, memory, None, memory, memory, HostMemory("two", 2**40)])
    assert share == 200 * MEBIBYTE
    for reported in (800 * MEBIBYTE, 200 * MEBIBYTE):
        assert (
            resolve_bucket_bytes(
                0.5,
                policy_memory_bytes=[reported] * 2,
                rollout_memory_bytes=[2**40] * 3,
                share_bytes=share,
            ).unwrap()
            == 100 * MEBIBYTE
        )


def test_the_memory_of_all_ranks_of_a_side_is_read_and_anything_else_named() -> None:
    assert reported_memory("rollout", [[1, 2], 3, [4.0]]).unwrap() == (1, 2, 3, 4)
    error = reported_memory("policy", [1, {"bytes": 2}]).failure()
    assert error == MemoryNotANumber(side="policy", reported="{'bytes': 2}")
    assert "policy worker reported its total memory as {'bytes': 2}" in describe(error)
