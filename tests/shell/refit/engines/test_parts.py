"""Buckets that come in parts: however a stream is cut, the same tensors arrive, and the ring of
buckets is never filled before it was released."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsync.pure.refit.control import BucketFilled, Piece
from rollsync.shell.refit.engines import outlets
from rollsync.shell.refit.engines.errors import StreamError
from rollsync.shell.refit.engines.mapping import can_mirror, map_file, reserve_file
from rollsync.shell.refit.engines.packing import StreamPacker
from rollsync.shell.refit.engines.rings import Assembly, Buffers, RunningChecksum, StreamRing
from rollsync.shell.refit.engines.unpacking import AnnouncedPart, StreamUnpacker
from tests.shell.refit.engines.pairs import pair

BUCKETS = 2
SIZES = st.lists(st.integers(0, 9000), min_size=1, max_size=12)


def buffers_of(bucket_bytes: int) -> Buffers:
    """Buffers in shared memory, mirrored where that is possible."""
    size = BUCKETS * bucket_bytes
    file = reserve_file(size)
    try:
        return Buffers.of(map_file(file, size), bucket_bytes, BUCKETS)
    finally:
        os.close(file)


def filled(bucket: int, begin: int, end: int, pieces: list[Piece]) -> BucketFilled:
    return BucketFilled(
        bucket=bucket,
        begin_bytes=begin,
        filled_bytes=end,
        checksum=None,
        pieces=tuple(pieces),
        aliases=(),
    )


class ReadableAssembly(Assembly):
    """Memory to which a receiver can read."""

    can_be_read_into = True


class Stream:
    """Both ends of a stream in one process.

    Args:
        buffers: what the stream goes through.
        is_cut: whether a part ends after a slice.
        waits: whether a part that has come is looked at only when the next one has.
        assembly: where tensors are put together that the ring cannot hold.
    """

    def __init__(
        self,
        buffers: Buffers,
        is_cut: Callable[[], bool],
        waits: Callable[[], bool] = lambda: False,
        assembly: Assembly | None = None,
    ) -> None:
        self.ring = StreamRing(buffers, 0, buffers.buffer_bytes)
        self.unpacker = StreamUnpacker(self.ring, assembly or Assembly())
        self._is_cut = is_cut
        self._waits = waits
        self._coming: deque[AnnouncedPart] = deque()
        self._released = 0
        self._announced = (0, 0)
        self._pieces: list[Piece] = []

    def exchange(self, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """What arrives, copied before the memory is released."""
        packer = StreamPacker(self.ring.ring.bucket_bytes)
        bucket, end = 0, 0
        for name, tensor in tensors.items():
            for chunk in packer.chunks(name, tensor):
                if chunk.bucket != bucket:
                    yield from self._hand_over(bucket, end)
                    bucket, end = chunk.bucket, 0
                    self._announced = (bucket, 0)
                copy, begin = chunk.copy_to(self.ring), 0
                for cut in copy.ends:
                    stop = chunk.piece.offset + cut
                    position = self.ring.ring.position(bucket, stop)
                    if self._is_cut() or not self.ring.ring.may_fill(position, self._released):
                        yield from self._hand_over(bucket, end)
                    if not self.ring.ring.may_fill(position, self._released):
                        yield from self._load(0)
                    assert self.ring.ring.may_fill(position, self._released)
                    if not begin:
                        self._pieces.append(chunk.piece)
                    copy.to(begin, cut)
                    begin, end = cut, stop
        yield from self._hand_over(bucket, end)
        yield from self._load(0)
        self.unpacker.check_complete()

    def _hand_over(self, bucket: int, end: int) -> Iterator[tuple[str, torch.Tensor]]:
        part = filled(bucket, self._announced[1], end, self._pieces)
        self._announced, self._pieces = (bucket, end), []
        expected = self.unpacker.expect(part)
        for stretch in expected.stretches:
            target = self.unpacker.place_for(stretch)
            if target is not None:
                target.copy_(self.ring.bytes(stretch.begin, len(target)))
        self._coming.append(expected)
        yield from self._load(1 if self._waits() else 0)

    def _load(self, left: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Take the parts that have come, but for the last `left`."""
        while len(self._coming) > left:
            expected = self._coming.popleft()
            self.unpacker.gather(expected, None)
            for name, tensor in self.unpacker.take(expected):
                yield name, tensor.clone()
            self.unpacker.settle(expected)
            assert expected.needed_from >= self._released
            self._released = expected.needed_from


@pytest.mark.parametrize("bucket_bytes", [256, 768, 2048, 4096])
@settings(max_examples=40)
@given(SIZES, st.randoms(use_true_random=False), st.sampled_from([Assembly, ReadableAssembly]))
def test_however_it_is_cut_a_stream_brings_the_same_tensors(
    bucket_bytes: int, sizes: list[int], random: Random, assembly: type[Assembly]
) -> None:
    tensors = {
        str(index): torch.randint(0, 255, (size,), dtype=torch.uint8)
        for index, size in enumerate(sizes)
    }
    stream = Stream(
        buffers_of(bucket_bytes),
        lambda: random.random() < 0.5,
        lambda: random.random() < 0.5,
        assembly(),
    )
    arrived = dict(stream.exchange(tensors))
    assert list(arrived) == list(tensors)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
    assert stream.unpacker.payload_bytes == sum(sizes)


def test_a_tensor_that_goes_round_the_ring_is_seen_in_one_piece() -> None:
    buffers = buffers_of(2048)
    assert can_mirror(buffers.size)
    assert len(buffers.memory) == 2 * buffers.size
    buffers.memory[5] = 7
    assert buffers.memory[buffers.size + 5] == 7


@pytest.mark.parametrize("size", [3 << 20, (3 << 20) + 1])
def test_a_large_tensor_is_copied_slice_by_slice(size: int) -> None:
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
    stream = Stream(buffers_of(1 << 20), lambda: True)
    ((name, arrived),) = stream.exchange({"large": tensor})
    assert name == "large"
    assert torch.equal(arrived, tensor)


def piece(name: str, offset: int, chunk_offset: int, chunk_bytes: int) -> Piece:
    return Piece(
        name=name,
        shape=(600,),
        dtype="uint8",
        offset=offset,
        chunk_offset=chunk_offset,
        chunk_bytes=chunk_bytes,
    )


def test_parts_that_break_the_packing_rules_are_refused() -> None:
    first, second = piece("a", 0, 0, 512), piece("a", 0, 512, 88)
    wrong: list[list[BucketFilled]] = [
        [filled(0, 0, 512, [piece("a", 256, 0, 512)])],
        [filled(0, 0, 512, [second])],
        [filled(0, 0, 512, [first, first])],
        [filled(0, 0, 500, [first]), filled(1, 0, 88, [second])],
        [filled(0, 0, 512, [first]), filled(1, 0, 88, [piece("b", 0, 512, 88)])],
        [filled(0, 0, 512, [first]), filled(1, 0, 256, [second, piece("b", 512, 0, 600)])],
    ]
    for parts in wrong:
        with pytest.raises(StreamError):
            take_all(parts)


@pytest.mark.parametrize("shape", [(2**61,), (2**62, 4), (0, 2**62, 2**62)])
def test_what_an_announcement_costs_does_not_grow_with_the_tensor_that_it_names(
    shape: tuple[int, ...],
) -> None:
    huge = Piece(name="huge", shape=shape, dtype="uint8", offset=0, chunk_offset=0, chunk_bytes=512)
    with pytest.raises(StreamError, match="huge"):
        take_all([filled(0, 0, 512, [huge])])


def take_all(parts: list[BucketFilled]) -> None:
    """Let a receiver with buckets of 512 bytes have them."""
    unpacker = StreamUnpacker(StreamRing(buffers_of(512), 0, 512), Assembly())
    for part in parts:
        expected = unpacker.expect(part)
        unpacker.gather(expected, None)
        unpacker.take(expected)
        unpacker.settle(expected)


def test_a_checksum_is_the_same_however_it_is_taken() -> None:
    buffers = buffers_of(2048)
    buffers.memory[: buffers.size].random_(0, 255)
    ring = StreamRing(buffers, 0, 2048)
    whole, sliced = RunningChecksum(ring, 2048), RunningChecksum(ring, 2048)
    whole.take(4096)
    for position in (2049, 2300, 4095, 4096):
        sliced.take(position)
    assert whole.hexdigest() == sliced.hexdigest()


def test_neither_end_is_stuck_when_more_parts_are_on_their_way_than_sockets_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlets, "PART_PIECES", 1)
    weights = {f"layers.{number}.weight": torch.full((8,), number) for number in range(700)}
    with pair("shm", bucket_bytes=1 << 20) as both:
        stream = both.stream(weights.items())
    stream.raise_first()
    assert stream.received[0].keys() == weights.keys()
    assert all(torch.equal(stream.received[0][name], each) for name, each in weights.items())


def test_a_receiver_knows_how_many_buckets_its_last_stream_had() -> None:
    with pair("shm", bucket_bytes=1024) as both:
        (receiver,) = both.receivers
        counted = [receiver.buckets]
        for size in (1024, 1025, 3000):
            both.stream([("weight", torch.ones(size, dtype=torch.uint8))]).raise_first()
            counted.append(receiver.buckets)
    assert counted == [None, 1, 2, 3]
