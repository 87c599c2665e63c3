"""Which policy worker trains which groups of a step.

Rule kept here: every group is trained by exactly one worker, groups stay whole (an advantage is
relative to its group) and in order, and no worker has two groups more than another.
"""

from __future__ import annotations


def share_groups(groups: int, workers: int) -> tuple[range, ...]:
    """The groups of each policy worker, by rank.

    Args:
        groups: how many the step has. With fewer than workers, the last ones have none.
        workers: how many there are, at least 1.
    """
    each, over = divmod(groups, workers)
    starts = [rank * each + min(rank, over) for rank in range(workers + 1)]
    return tuple(range(starts[rank], starts[rank + 1]) for rank in range(workers))
