"""What a relay says for its receivers, and that no chain of rings waits for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import ALIGNMENT_BYTES, Cursor, TensorSpec, place_tensor
from rollsync.pure.refit.control import PlanAnswered
from rollsync.pure.refit.relays import answer_for_all, differs, released_by_all
from rollsync.pure.refit.ring import Ring

DIGESTS = (None, "a", "b")
ANSWERS = [PlanAnswered(digest=digest, layout=layout) for digest in DIGESTS for layout in DIGESTS]


@pytest.mark.parametrize("offered", DIGESTS)
def test_a_relay_answers_what_holds_for_everybody(offered: str | None) -> None:
    for own, first, second in product(ANSWERS, repeat=3):
        answers = (own, first, second)
        answer = answer_for_all(offered, own, (first, second))
        assert differs(offered, answer) == any(differs(offered, each) for each in answers)
        if not differs(offered, answer):
            assert answer.digest == own.digest
        # Nobody is sent less than it keeps: all of every tensor is enough for all.
        alike = {each.layout for each in answers} == {own.layout}
        assert answer.layout == (own.layout if alike else None)


@given(st.integers(0, 1000), st.lists(st.integers(0, 1000)))
def test_nothing_is_released_that_anybody_needs(own: int, receivers: list[int]) -> None:
    released = released_by_all(own, receivers)
    assert released in (own, *receivers)
    assert all(released <= each for each in (own, *receivers))


class Worker(NamedTuple):
    """How far a worker of a tree has got, in blocks of the stream.

    Attributes:
        taken: what has come, and was passed on.
        loaded: what it needs no more.
        released: what it has told its sender of.
    """

    taken: int = 0
    loaded: int = 0
    released: int = 0


class World:
    """A stream that goes down a tree of rings: what each worker may do next.

    Args:
        sizes: of its tensors, bytes.
        rings: each worker's; a relay's has the size of its sender's.
        parents: by worker, who sends to it; -1 is the policy worker.
    """

    def __init__(self, sizes: Sequence[int], rings: Sequence[Ring], parents: Sequence[int]) -> None:
        self._rings = rings
        self._parents = parents
        self._ring = rings[0]
        self._tensors: list[tuple[int, int]] = []
        cursor = Cursor()
        for index, size in enumerate(sizes):
            spec = TensorSpec(str(index), (size,), "uint8")
            cursor, chunks = place_tensor(cursor, spec, self._ring.bucket_bytes)
            start = self._ring.position(chunks[0].bucket, chunks[0].offset)
            self._tensors.append((start, size))
        self._end = max(start + size for start, size in self._tensors)
        self.blocks = -(-self._end // ALIGNMENT_BYTES)

    def _position(self, block: int) -> int:
        return min(block * ALIGNMENT_BYTES, self._end)

    def settled(self, worker: int, taken: int) -> int:
        """What a worker needs no more when so much has come and is loaded."""
        end = self._position(taken)
        for start, size in self._tensors:
            if start < end < start + size and self._rings[worker].holds(start, size):
                return start
        return end

    def steps(
        self, filled: int, workers: tuple[Worker, ...]
    ) -> Iterator[tuple[int, tuple[Worker, ...]]]:
        """Every state that one action leads to."""
        told = [worker.released for worker in workers]
        mine = [told[i] for i, parent in enumerate(self._parents) if parent < 0]
        if filled < self.blocks and self._ring.may_fill(self._position(filled + 1), min(mine)):
            yield filled + 1, workers
        for index, worker in enumerate(workers):
            parent = self._parents[index]
            announced = filled if parent < 0 else workers[parent].taken
            below = [told[i] for i, above in enumerate(self._parents) if above == index]
            # A part is read into the place of one that everybody further on has released.
            if worker.taken < announced:
                end = self._position(worker.taken + 1)
                assert all(self._ring.may_fill(end, each) for each in (worker.loaded, *below))
                yield filled, _with(workers, index, worker._replace(taken=worker.taken + 1))
            loaded = self.settled(index, worker.taken)
            if loaded > worker.loaded:
                yield filled, _with(workers, index, worker._replace(loaded=loaded))
            released = released_by_all(worker.loaded, below)
            if released > worker.released:
                yield filled, _with(workers, index, worker._replace(released=released))

    def explore(self) -> int:
        """Every order of events; how many states there are.

        Raises:
            AssertionError: a state that is not the end leads nowhere.
        """
        first = (0, (Worker(),) * len(self._parents))
        end = (self.blocks, (Worker(self.blocks, self._end, self._end),) * len(self._parents))
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            following = list(self.steps(*state))
            assert following or state == end, f"everybody waits in {state}"
            for each in following:
                if each not in seen:
                    seen.add(each)
                    left.append(each)
        assert end in seen
        return len(seen)


def _with(workers: tuple[Worker, ...], index: int, worker: Worker) -> tuple[Worker, ...]:
    return (*workers[:index], worker, *workers[index + 1 :])


BLOCK = ALIGNMENT_BYTES
STREAMS = [
    *product((BLOCK, 2 * BLOCK - 1, 3 * BLOCK), repeat=2),
    (3 * BLOCK, 5 * BLOCK),
    (5 * BLOCK, 3 * BLOCK),
]
"""Tensors of every size around that of a ring."""
MIXED = (True, False, True)
"""Which rings have a mirror, and so hold tensors that others do not."""


@pytest.mark.parametrize("buckets", [1, 2])
@pytest.mark.parametrize(
    ("parents", "mirrored"),
    [
        ((-1, 0, 1), MIXED),
        ((-1, 0, 1), (False, True, False)),
        ((-1, 0, 1), (True,) * 3),
        ((-1, 0, 0), MIXED),
        ((-1, -1, 0), MIXED),
    ],
)
def test_no_tree_of_rings_waits_for_itself(
    parents: tuple[int, ...], mirrored: tuple[bool, ...], buckets: int
) -> None:
    rings = [Ring(bucket_bytes=2 * BLOCK, buckets=buckets, mirrored=each) for each in mirrored]
    for stream in STREAMS:
        assert World(stream, rings, parents).explore() > 1
