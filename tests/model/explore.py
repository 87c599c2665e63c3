"""Exhaustive exploration: every moment that a world can reach, breadth first, each seen once.

Moments are the same if their `essence` is equal (compared as a value, so no hash can hide one). The
first broken promise ends the exploration, with the shortest way to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable

from msgspec import Struct

from tests.model.essence import essence
from tests.model.promise import broken_end, broken_promise
from tests.model.world import Broken, Config, Edge, Machine, Node, edges, initial

CameFrom = dict[Hashable, tuple[Hashable, str] | None]


class Report(Struct, frozen=True, kw_only=True):
    """What an exploration found."""

    states: int
    """Distinct moments."""
    transitions: int
    ends: int
    """Moments at which the run is over."""
    kinds: tuple[tuple[str, int], ...]
    """How many transitions of each kind there were."""
    counterexample: tuple[str, ...] = ()
    """The shortest way to a broken promise, step by step, and what is broken; empty if none."""


def explore(
    config: Config,
    machine: Machine | None = None,
    *,
    key_of: Callable[[Node], Hashable] = essence,
    visit: Callable[[Node], None] = lambda _: None,
) -> Report:
    """Visit every reachable moment, one for each key."""
    machine = Machine() if machine is None else machine
    start = initial(config)
    came_from: CameFrom = {key_of(start): None}
    waiting = deque([(start, key_of(start))])
    transitions = ends = 0
    kinds: Counter[str] = Counter()

    def report(*counterexample: str) -> Report:
        return Report(
            states=len(came_from),
            transitions=transitions,
            ends=ends,
            kinds=tuple(sorted(kinds.items())),
            counterexample=counterexample,
        )

    while waiting:
        node, key = waiting.popleft()
        visit(node)
        wrong = broken_promise(config, node)
        following: list[Edge] = []
        if wrong is None:
            try:
                following = list(edges(config, machine, node))
            except Broken as broken:
                wrong = str(broken)
        if wrong is None and not any(edge.productive for edge in following):
            ends += 1
            wrong = broken_end(config, node)
        if wrong is not None:
            return report(*_way(came_from, key), f"BROKEN: {wrong}")
        for edge in following:
            transitions += 1
            kinds[_kind(edge.label)] += 1
            reached = key_of(edge.node)
            if reached not in came_from:
                came_from[reached] = (key, edge.label)
                waiting.append((edge.node, reached))
    return report()


def _kind(label: str) -> str:
    """The label without the names in it."""
    if "CRASH" in label:
        return label
    verb, _, rest = label.partition(" ")
    _, _, reason = rest.partition("(")
    return f"{verb} ({reason}" if reason else verb


def _way(came_from: CameFrom, key: Hashable) -> tuple[str, ...]:
    labels: list[str] = []
    at = came_from[key]
    while at is not None:
        key, label = at
        labels.append(label)
        at = came_from[key]
    return tuple(reversed(labels))
