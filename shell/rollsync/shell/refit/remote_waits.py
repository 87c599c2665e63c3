"""Waits for what remote workers were asked for.

Rule kept here: a failure ends the wait at once, whoever else is at work still; and so does a
deadline, which may move when some have ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import ray
from ray import ObjectRef

_T = TypeVar("_T")


def wait_for_all(
    refs: Sequence[ObjectRef[_T]], until_s: Callable[[Sequence[ObjectRef[_T]]], float]
) -> list[ObjectRef[_T]]:
    """Wait until all have ended, one of them has failed, or it is too late.

    Args:
        refs: what was asked for.
        until_s: reading of `time.monotonic` at which it is too late, for those who are busy now.

    Returns:
        Those that have not ended.
    """
    busy = list(refs)
    while busy and (left_s := until_s(busy) - time.monotonic()) > 0:
        ray.wait(busy, timeout=left_s)
        ended, busy = ray.wait(busy, num_returns=len(busy), timeout=0)
        if any(isinstance(answer_of(ref), Exception) for ref in ended):
            break
    return busy


def answer_of(ref: ObjectRef[_T]) -> _T | Exception:
    """What one that has ended answered or raised."""
    try:
        return ray.get(ref)
    except Exception as error:
        return error
