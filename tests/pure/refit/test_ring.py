"""Positions of a ring, in every small world, and that neither end of it waits for the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.pure.refit import ALIGNMENT_BYTES, Cursor, TensorSpec, place_tensor
from rollsync.pure.refit.ring import Ring

BLOCKS = st.integers(1, 6).map(lambda blocks: blocks * ALIGNMENT_BYTES)


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    return Ring(
        bucket_bytes=draw(BLOCKS), buckets=draw(st.integers(1, 4)), mirrored=draw(st.booleans())
    )


@given(rings(), st.integers(0, 10_000))
def test_a_position_is_a_byte_of_a_bucket(ring: Ring, position: int) -> None:
    bucket, offset = ring.bucket_at(position)
    assert ring.position(bucket, offset) == position
    assert 0 <= offset < ring.bucket_bytes
    assert ring.place(position) == bucket % ring.buckets * ring.bucket_bytes + offset


@given(rings(), st.lists(st.integers(0, 4000), max_size=8))
def test_a_tensor_lies_at_consecutive_positions(ring: Ring, sizes: list[int]) -> None:
    cursor = Cursor()
    for index, size in enumerate(sizes):
        spec = TensorSpec(str(index), (size,), "uint8")
        cursor, chunks = place_tensor(cursor, spec, ring.bucket_bytes)
        start = ring.position(chunks[0].bucket, chunks[0].offset)
        for chunk in chunks:
            assert ring.position(chunk.bucket, chunk.offset) == start + chunk.chunk_offset


@given(rings(), st.integers(0, 5000), st.integers(0, 5000))
def test_what_the_ring_holds_is_in_one_piece_and_is_not_waited_for_in_vain(
    ring: Ring, blocks: int, size: int
) -> None:
    start = blocks * ALIGNMENT_BYTES
    if not ring.holds(start, size):
        return
    memory_bytes = ring.ring_bytes * (2 if ring.mirrored else 1)
    assert ring.place(start) + size <= memory_bytes
    # What is released ends at the last byte of the tensor before, in front of the padding.
    for released in range(start - ALIGNMENT_BYTES + 1, start + 1):
        assert ring.may_fill(start + size, released)


@pytest.mark.parametrize("buckets", [1, 2, 3])
def test_nothing_is_filled_before_it_was_released_a_ring_ago(buckets: int) -> None:
    ring = Ring(bucket_bytes=ALIGNMENT_BYTES, buckets=buckets, mirrored=True)
    for released in range(3 * ALIGNMENT_BYTES):
        assert ring.may_fill(released + ring.ring_bytes, released)
        assert not ring.may_fill(released + ring.ring_bytes + 1, released)


def test_a_ring_without_a_mirror_ends() -> None:
    ring = Ring(bucket_bytes=512, buckets=2, mirrored=False)
    assert ring.holds(512, 512)
    assert ring.holds(256, 768)
    assert not ring.holds(512, 513)
    assert not ring.holds(1024, 1024)
