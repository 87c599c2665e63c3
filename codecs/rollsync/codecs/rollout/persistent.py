"""Persistent collections as sorted arrays: the order on the wire does not depend on hashes."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import TypeVar

from rpds import HashTrieMap, HashTrieSet

from rollsync.pure.rollout.persistent import items_of

K = TypeVar("K", str, int)
V = TypeVar("V")


def sorted_items(items: HashTrieMap[K, V]) -> list[tuple[K, V]]:
    """Keys and values, by key."""
    pairs = items_of(items)
    by_key: Callable[[tuple[K, V]], K] = itemgetter(0)
    pairs.sort(key=by_key)
    return pairs


def sorted_values(items: HashTrieMap[K, V]) -> list[V]:
    """Values, by key."""
    return [value for _, value in sorted_items(items)]


def sorted_members(members: HashTrieSet[str]) -> list[str]:
    """Members, in order."""
    return sorted(members)
