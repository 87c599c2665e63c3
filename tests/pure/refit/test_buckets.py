"""The bucket plan: what holds for every stream of tensors and every bucket size."""

from __future__ import annotations

import math
from functools import reduce

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from returns.pipeline import is_successful

from rollsync.pure.refit import (
    ALIGNMENT_BYTES,
    DTYPE_BYTES,
    BucketPlan,
    Chunk,
    Cursor,
    Placement,
    TensorSpec,
    chunk_after,
    describe,
    place_first,
    place_tensor,
    plan_buckets,
)
from rollsync.pure.refit.buckets import StreamSize, measure_stream
from rollsync.pure.refit.errors import (
    BucketSizeUnaligned,
    NegativeDimension,
    PlanError,
    TensorNamedTwice,
    UnknownDtype,
)

SHAPES = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.integers(1, 3000).map(lambda size: (size,)),
)
BUCKET_BYTES = st.integers(1, 16).map(lambda n: n * ALIGNMENT_BYTES)


def planned(specs: list[TensorSpec], bucket_bytes: int) -> BucketPlan:
    return plan_buckets(specs, bucket_bytes).unwrap()


def refused(specs: list[TensorSpec], bucket_bytes: int = ALIGNMENT_BYTES) -> PlanError:
    return plan_buckets(specs, bucket_bytes).failure()


@st.composite
def streams(draw: st.DrawFn) -> list[TensorSpec]:
    kinds = draw(st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), max_size=30))
    return [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)]


def uint8(*sizes: int) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", (size,), "uint8") for i, size in enumerate(sizes)]


@given(streams(), BUCKET_BYTES)
@example(uint8(256, 0, 256), 256)
@example(uint8(255, 257, 0, 768), 256)
def test_every_byte_of_every_tensor_lies_in_exactly_one_chunk(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    plan = planned(specs, bucket_bytes)
    assert list(plan.specs) == specs
    for placement in plan.placements:
        covered = 0
        for chunk in placement.chunks:
            assert chunk.chunk_offset == covered
            covered += chunk.chunk_bytes
        assert covered == placement.spec.tensor_bytes
        assert len(placement.chunks) == 1 or all(c.chunk_bytes for c in placement.chunks)


@given(streams(), BUCKET_BYTES)
@example(uint8(256, 0, 256), 256)
@example(uint8(255, 257, 0, 768), 256)
def test_chunks_lie_in_stream_order_without_overlap_inside_the_filled_part(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    plan = planned(specs, bucket_bytes)
    end = (0, 0)
    for placement in plan.placements:
        for chunk in placement.chunks:
            assert (chunk.bucket, chunk.offset) >= end
            end = (chunk.bucket, chunk.offset + chunk.chunk_bytes)
            assert end[1] <= plan.filled_bytes[chunk.bucket] <= bucket_bytes


@given(streams(), BUCKET_BYTES)
def test_every_chunk_is_a_whole_number_of_elements_at_an_aligned_offset(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    for placement in planned(specs, bucket_bytes).placements:
        element_bytes = DTYPE_BYTES[placement.spec.dtype]
        for chunk in placement.chunks:
            assert chunk.offset % ALIGNMENT_BYTES == 0
            assert chunk.chunk_offset % element_bytes == 0
            assert chunk.chunk_bytes % element_bytes == 0


@given(streams(), BUCKET_BYTES)
@example(uint8(256, 0, 256), 256)
def test_only_the_last_bucket_is_closed_early(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = planned(specs, bucket_bytes)
    chunks = [chunk for placement in plan.placements for chunk in placement.chunks]
    ends = {chunk.bucket: chunk.offset + chunk.chunk_bytes for chunk in chunks}
    assert plan.filled_bytes == tuple(ends[bucket] for bucket in range(len(ends)))
    for filled in plan.filled_bytes[:-1]:
        assert bucket_bytes - ALIGNMENT_BYTES < filled <= bucket_bytes
    assert plan.moved_bytes - plan.payload_bytes < ALIGNMENT_BYTES * max(1, len(specs))


@given(streams(), BUCKET_BYTES)
def test_the_plan_is_the_fold_of_the_one_tensor_step(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    def step(
        so_far: tuple[Cursor, tuple[Placement, ...]], spec: TensorSpec
    ) -> tuple[Cursor, tuple[Placement, ...]]:
        cursor, chunks = place_tensor(so_far[0], spec, bucket_bytes)
        return cursor, (*so_far[1], Placement(spec, chunks))

    start: tuple[Cursor, tuple[Placement, ...]] = (Cursor(), ())
    cursor, placements = reduce(step, specs, start)
    plan = planned(specs, bucket_bytes)
    assert placements == plan.placements
    assert cursor == (
        Cursor(len(plan.filled_bytes) - 1, plan.filled_bytes[-1]) if specs else Cursor()
    )


@given(streams(), BUCKET_BYTES)
def test_the_chunks_of_a_tensor_can_be_had_one_by_one(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    cursor = Cursor()
    for spec, placement in zip(specs, planned(specs, bucket_bytes).placements, strict=True):
        cursor, first = place_first(cursor, spec, bucket_bytes)
        following: Chunk | None = first
        for expected in placement.chunks:
            assert following == expected
            following = chunk_after(expected, spec.tensor_bytes, bucket_bytes)
        assert following is None


def test_where_a_tensor_begins_and_ends_is_found_without_its_chunks() -> None:
    spec = TensorSpec("huge", (2**62,), "uint8")
    after, chunk = place_first(Cursor(3, 256), spec, 512)
    assert chunk == Chunk(3, 256, 0, 256)
    assert after == Cursor(3 + 2**53, 256)


@given(streams(), streams(), BUCKET_BYTES)
def test_what_follows_does_not_change_where_a_tensor_lies(
    specs: list[TensorSpec], more: list[TensorSpec], bucket_bytes: int
) -> None:
    later = [TensorSpec(f"later.{s.name}", s.shape, s.dtype) for s in more]
    whole = planned(specs + later, bucket_bytes)
    assert whole.placements[: len(specs)] == planned(specs, bucket_bytes).placements


def test_a_stream_of_one_less_exactly_one_more_and_three_buckets() -> None:
    plan = planned(uint8(255, 256, 257, 768), 256)
    assert [placement.chunks for placement in plan.placements] == [
        (Chunk(0, 0, 0, 255),),
        (Chunk(1, 0, 0, 256),),
        (Chunk(2, 0, 0, 256), Chunk(3, 0, 256, 1)),
        (Chunk(4, 0, 0, 256), Chunk(5, 0, 256, 256), Chunk(6, 0, 512, 256)),
    ]
    assert plan.filled_bytes == (255, 256, 256, 1, 256, 256, 256)


def test_three_bfloat16_values_followed_by_float32_ones() -> None:
    plan = planned([TensorSpec("a", (3,), "bfloat16"), TensorSpec("b", (5,), "float32")], 512)
    assert [p.chunks for p in plan.placements] == [
        (Chunk(0, 0, 0, 6),),
        (Chunk(0, 256, 0, 20),),
    ]


def test_tensors_without_bytes_and_without_dimensions_are_carried() -> None:
    specs = [
        TensorSpec("empty", (0, 8), "float32"),
        TensorSpec("scalar", (), "float64"),
        TensorSpec("empty.too", (3, 0), "bfloat16"),
        TensorSpec("row", (4,), "float32"),
    ]
    plan = planned(specs, 512)
    assert [p.chunks for p in plan.placements] == [
        (Chunk(0, 0, 0, 0),),
        (Chunk(0, 0, 0, 8),),
        (Chunk(0, 256, 0, 0),),
        (Chunk(0, 256, 0, 16),),
    ]
    assert planned(specs[:1], 512).filled_bytes == (0,)


def test_a_stream_of_nothing_has_no_bucket() -> None:
    assert planned([], 256) == BucketPlan(bucket_bytes=256, placements=(), filled_bytes=())


def test_tied_weights_are_placed_once() -> None:
    tied = TensorSpec("embed.weight", (4, 8), "bfloat16", ("lm_head.weight",))
    plan = planned([tied, TensorSpec("norm.weight", (8,), "bfloat16")], 256)
    assert plan.payload_bytes == 4 * 8 * 2 + 8 * 2
    assert plan.placements[0] == Placement(tied, (Chunk(0, 0, 0, 64),))


@pytest.mark.parametrize(
    "specs",
    [
        [TensorSpec("a", (1,), "int8"), TensorSpec("a", (2,), "int8")],
        [TensorSpec("a", (1,), "int8", ("b",)), TensorSpec("b", (1,), "int8")],
        [TensorSpec("a", (1,), "int8"), TensorSpec("b", (1,), "int8", ("a",))],
        [TensorSpec("a", (1,), "int8", ("c",)), TensorSpec("b", (1,), "int8", ("c",))],
        [TensorSpec("a", (1,), "int8", ("a",))],
        [TensorSpec("a", (1,), "int8", ("b", "b"))],
    ],
)
def test_a_name_may_come_once(specs: list[TensorSpec]) -> None:
    error = refused(specs)
    last = specs[-1]
    assert error == TensorNamedTwice(tensor=last.name, aliases=last.aliases)
    assert repr(last.name) in describe(error)


def test_a_dtype_without_a_known_size_is_refused() -> None:
    error = refused([TensorSpec("a", (1,), "torch.bfloat16")])
    assert error == UnknownDtype(tensor="a", dtype="torch.bfloat16")
    assert "'torch.bfloat16'" in describe(error)


def test_a_negative_dimension_is_refused() -> None:
    error = refused([TensorSpec("a", (2, -1), "int8")])
    assert error == NegativeDimension(tensor="a", shape=(2, -1))
    assert "[2, -1]" in describe(error)


@pytest.mark.parametrize("bucket_bytes", [0, -256, 255, 257, 1000])
def test_a_bucket_is_a_positive_multiple_of_the_alignment(bucket_bytes: int) -> None:
    error = refused([], bucket_bytes)
    assert error == BucketSizeUnaligned(bucket_bytes=bucket_bytes, alignment_bytes=256)
    assert "256" in describe(error)


def test_a_bucket_of_any_multiple_of_the_alignment_is_accepted() -> None:
    assert all(is_successful(plan_buckets([], n * ALIGNMENT_BYTES)) for n in range(1, 20))


def test_the_alignment_is_a_multiple_of_every_element_size() -> None:
    assert ALIGNMENT_BYTES % math.lcm(*DTYPE_BYTES.values()) == 0


@given(streams(), BUCKET_BYTES)
@example(uint8(256, 0, 256), 256)
@example(uint8(255, 257, 0, 768), 256)
@example(uint8(1, 255, 256 * 5), 256)
def test_a_stream_is_measured_as_it_is_planned(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = planned(specs, bucket_bytes)
    assert measure_stream(specs, bucket_bytes).unwrap() == StreamSize(
        payload_bytes=plan.payload_bytes,
        moved_bytes=plan.moved_bytes,
        buckets=len(plan.filled_bytes),
        fullest_bucket_bytes=max(plan.filled_bytes, default=0),
        last_bucket_bytes=plan.filled_bytes[-1] if specs else 0,
        largest_bytes=max((spec.tensor_bytes for spec in specs), default=0),
    )


def test_a_stream_that_cannot_be_planned_is_not_measured() -> None:
    twice = [*uint8(1), *uint8(1)]
    for specs, bucket_bytes in ((twice, 256), (uint8(1), 255)):
        error = plan_buckets(specs, bucket_bytes).failure()
        assert measure_stream(specs, bucket_bytes).failure() == error
