"""When a save adds to the chain of the one before: bounds on links, on what is read and written."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.chain import MAX_DIFFERENCES, extends
from rollsync.pure.snapshot.manifest import SnapshotSegment

SNAPSHOT, CHECKPOINT = CheckpointKind.ROLLOUT_SNAPSHOT, CheckpointKind.TRAINER_CHECKPOINT


def segment(size_bytes: int) -> SnapshotSegment:
    return SnapshotSegment(digest="00" * 32, size_bytes=size_bytes)


def test_a_checkpoint_and_a_first_save_begin_a_chain() -> None:
    assert not extends((segment(1000),), 1, CHECKPOINT)
    assert not extends((), 1, SNAPSHOT)
    assert extends((segment(1000),), 1, SNAPSHOT)


def test_every_small_chain() -> None:
    """All chains of a base of 8 bytes and differences of 1 to 5."""
    chains: list[tuple[SnapshotSegment, ...]] = [(segment(8),)]
    for chain in chains:
        held = sum(link.size_bytes for link in chain[1:])
        for size in range(1, 6):
            assert extends(chain, size, SNAPSHOT) is (held + size <= 4)
            if extends(chain, size, SNAPSHOT):
                chains.append((*chain, segment(size)))
    assert len(chains) == 16, "as many as there are sequences with a sum of at most 4"


def test_the_number_of_differences_is_bounded() -> None:
    chain: tuple[SnapshotSegment, ...] = (segment(10**9),)
    for length in count():
        if not extends(chain, 1, SNAPSHOT):
            break
        assert length < MAX_DIFFERENCES
        chain = (*chain, segment(1))
    assert len(chain) == 1 + MAX_DIFFERENCES


@given(st.integers(1000, 10**6), st.lists(st.integers(1, 10**5), min_size=1, max_size=300))
def test_bytes_written_and_read_stay_within_a_factor(base: int, changes: list[int]) -> None:
    """However large a state is and however much of it changes: what is read is at most one and a
    half states, and what is written is bounded by what changed, and the base now and then."""
    chain: tuple[SnapshotSegment, ...] = (segment(base),)
    written = bases = 0
    for change in changes:
        if extends(chain, change, SNAPSHOT):
            chain = (*chain, segment(change))
            written += change
        else:
            chain = (segment(base),)
            written += base
            bases += 1
        assert sum(link.size_bytes for link in chain) <= 1.5 * base
    # A base is written for half of it in changes, or for many of them.
    assert written <= 3 * sum(changes) + base * (len(changes) // MAX_DIFFERENCES)
    assert bases <= 2 * sum(changes) / base + len(changes) / MAX_DIFFERENCES
