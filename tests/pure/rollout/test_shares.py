"""Every group of a step is somebody's, and the shares are even."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.rollout.shares import share_groups


@given(st.integers(0, 200), st.integers(1, 50))
def test_each_group_has_one_worker_in_order(groups: int, workers: int) -> None:
    shares = share_groups(groups, workers)
    assert len(shares) == workers
    assert [index for share in shares for index in share] == list(range(groups))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
