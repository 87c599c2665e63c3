"""Tensors that the ring of buckets cannot hold: over NIXL they are read to where they are put
together, where that memory could be registered, and come the same where it could not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rollsync.shell.refit.engines.mapping import map_file, reserve_file
from rollsync.shell.refit.engines.nixl_agent import NixlAgent, Read, RegistrationError
from rollsync.shell.refit.engines.rings import Assembly, StreamRing
from tests.shell.refit.engines.pairs import BUCKET_BYTES, Pair, pair

LARGE_PAGE = 2 << 20


def random_bytes(*sizes: int) -> dict[str, torch.Tensor]:
    return {
        str(n): torch.randint(0, 255, (size,), dtype=torch.uint8) for n, size in enumerate(sizes)
    }


def check(both: Pair, weights: dict[str, torch.Tensor]) -> None:
    """Two streams bring all of it."""
    for _ in range(2):
        stream = both.stream(weights.items())
        stream.raise_first()
        assert list(stream.received[0]) == list(weights)
        assert all(torch.equal(stream.received[0][name], each) for name, each in weights.items())


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were copied at a time to where a tensor is put together."""
    sizes: list[int] = []
    put = Assembly.put

    def noting(self: Assembly, start: int, ring: StreamRing, position: int, size: int) -> None:
        sizes.append(size)
        put(self, start, ring, position, size)

    monkeypatch.setattr(Assembly, "put", noting)
    return sizes


def test_what_the_ring_cannot_hold_is_read_to_where_it_is_put_together(copied: list[int]) -> None:
    with pair("nixl") as both:
        check(both, random_bytes(100, 5 * BUCKET_BYTES, 300))
    assert copied == []


def test_it_comes_through_the_ring_where_no_more_memory_can_be_registered(
    copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(agent: NixlAgent, buffers: Sequence[torch.Tensor]) -> None:
        raise RegistrationError("out of locked memory", remedy="raise the limit")

    with pair("nixl") as both:
        monkeypatch.setattr(NixlAgent, "register", refuse)
        check(both, random_bytes(100, 5 * BUCKET_BYTES, 300))
    assert sum(copied) == 2 * 5 * BUCKET_BYTES


def test_the_next_one_waits_until_the_memory_is_free_also_when_reads_take_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_done, asked = Read.is_done, set[int]()

    def done_later(read: Read) -> bool:
        first = id(read) not in asked
        asked.add(id(read))
        return not first and is_done(read)

    monkeypatch.setattr(Read, "is_done", done_later)
    with pair("nixl") as both:
        check(both, random_bytes(30_000, 20_000, 9_000, 10, 3_000, 40_000, 16_384, 8_192))
    assert asked


def resident_kib(address: int) -> int:
    """How much of the mapping that begins there is looked up already."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    return next(int(line.split()[1]) for line in lines[begin:] if line.startswith("Rss:"))


@pytest.mark.parametrize("size", [2 * LARGE_PAGE, 3 * LARGE_PAGE // 2])
def test_shared_buffers_begin_where_a_large_page_may_and_no_stream_waits_for_pages(
    size: int,
) -> None:
    file = reserve_file(size)
    try:
        memory = map_file(file, size).tensor
    finally:
        os.close(file)
    address = memory.data_ptr()
    assert address % LARGE_PAGE == 0
    assert [resident_kib(address), resident_kib(address + size)] == [size // 1024, size // 1024]
    memory[size - 1] = 7
    assert memory[2 * size - 1] == 7
