"""Which memory comes to be in large pages, and that nothing else changes.

Every test holds where the kernel gives large pages and where it gives none: what it allows is found
out by asking it for one.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rollsync.shell.refit.engines import large_pages
from rollsync.shell.refit.engines.large_pages import LargePages, memory_in_large_pages
from tests.bench.refit_direct_ends import destinations_to
from tests.shell.refit.engines.test_direct import ends

LARGE = 2 << 20
FOUR_AND_A_BIT = 4 * LARGE + LARGE // 2
_PR_SET_THP_DISABLE = 41


def large_kib(address: int) -> int:
    """How much of the mapping that an address is in is in large pages."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            first, last = (int(end, 16) for end in head.split("-"))
            is_here = first <= address < last
        elif is_here and head == "AnonHugePages:":
            return int(line.split()[1])
    raise ValueError(f"{address:x} is in no mapping")


@contextmanager
def none_given() -> Iterator[None]:
    """The kernel gives this process no large pages."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_THP_DISABLE, ctypes.c_ulong(1), 0, 0, 0) == 0
    yield
    assert libc.prctl(_PR_SET_THP_DISABLE, ctypes.c_ulong(0), 0, 0, 0) == 0


def apart(size: int, *, every: int = 1) -> torch.Tensor:
    """`(size,)` uint8 in a mapping of its own, in ordinary pages, from half a large page on.

    Args:
        every: which of its pages are there: each, every second, and so on.
    """
    total = size + 2 * LARGE
    memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Neighbouring mappings are one to the kernel unless they differ, so the last page, which is
    # not used, is like no other one.
    memory.madvise(mmap.MADV_DONTDUMP)
    memory.madvise(mmap.MADV_DONTFORK, total - mmap.PAGESIZE, mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE + LARGE // 2
    tensor = whole[begin : begin + size]
    with none_given():
        if every == 1:
            return tensor.copy_(torch.arange(size).remainder_(251))
        tensor[:: every * mmap.PAGESIZE] = 1
    return tensor


def enlarge(pages: LargePages, most_s: float = 60.0) -> None:
    asyncio.run(pages.enlarge(most_s))


@pytest.fixture
def given() -> int:
    """KiB that this kernel gives of one large page."""
    tensor = apart(2 * LARGE)
    inside = -(-tensor.data_ptr() // LARGE) * LARGE
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return LARGE >> 10 if libc.madvise(inside, LARGE, 25) == 0 else 0


def test_the_inside_of_a_tensor_comes_to_be_in_large_pages(given: int) -> None:
    tensor = apart(FOUR_AND_A_BIT)
    before = tensor.clone()
    pages = LargePages()
    pages.note(tensor)
    assert pages.are_due()
    enlarge(pages)
    assert not pages.are_due()
    assert large_kib(tensor.data_ptr()) == 4 * given
    assert torch.equal(tensor, before)


def test_tensors_that_follow_each_other_share_large_pages(given: int) -> None:
    tensor = apart(FOUR_AND_A_BIT)
    pages = LargePages()
    for part in tensor.split(LARGE * 3 // 4):
        pages.note(part)
    enlarge(pages)
    assert large_kib(tensor.data_ptr()) == 4 * given


def test_memory_that_is_not_noted_stays_as_it_is(given: int) -> None:
    tensor = apart(FOUR_AND_A_BIT)
    pages = LargePages()
    # All of the second large page but one page, and nothing of the third.
    begin = LARGE // 2
    pages.note(tensor[begin : begin + LARGE])
    pages.note(tensor[begin + LARGE : begin + 2 * LARGE - mmap.PAGESIZE])
    enlarge(pages)
    assert large_kib(tensor.data_ptr()) == given


def test_no_more_memory_is_taken_for_pages_that_are_not_there() -> None:
    tensor = apart(FOUR_AND_A_BIT, every=2)
    pages = LargePages()
    pages.note(tensor)
    enlarge(pages)
    assert large_kib(tensor.data_ptr()) == 0


def test_pages_that_a_child_shares_stay_shared(given: int) -> None:
    tensor = apart(FOUR_AND_A_BIT)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    pages = LargePages()
    pages.note(tensor)
    enlarge(pages)
    while_shared = large_kib(tensor.data_ptr())
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)
    alone = LargePages()
    alone.note(tensor)
    enlarge(alone)
    assert while_shared == 0
    assert large_kib(tensor.data_ptr()) == 4 * given


def test_what_is_gone_is_not_due() -> None:
    tensor = apart(FOUR_AND_A_BIT)
    pages = LargePages()
    pages.note(tensor)
    del tensor
    assert not pages.are_due()


def test_the_rest_waits_for_the_next_time(given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "MOST_BYTES", 3 * LARGE)
    tensor = apart(FOUR_AND_A_BIT)
    pages = LargePages()
    pages.note(tensor)
    enlarge(pages)
    assert pages.are_due()
    assert large_kib(tensor.data_ptr()) == 3 * given
    enlarge(pages)
    assert not pages.are_due()
    assert large_kib(tensor.data_ptr()) == 4 * given


def test_nothing_is_done_when_there_is_no_time() -> None:
    tensor = apart(FOUR_AND_A_BIT)
    pages = LargePages()
    pages.note(tensor)
    enlarge(pages, most_s=-1.0)
    assert pages.are_due()
    assert large_kib(tensor.data_ptr()) == 0


def test_a_kernel_that_gives_none_costs_nothing_else() -> None:
    tensor = apart(FOUR_AND_A_BIT)
    before = tensor.clone()
    pages = LargePages()
    pages.note(tensor)
    with none_given():
        enlarge(pages)
    assert not pages.are_due()
    assert large_kib(tensor.data_ptr()) == 0
    assert torch.equal(tensor, before)


def test_memory_of_its_own_is_whole() -> None:
    memory = memory_in_large_pages(LARGE + 5).tensor
    assert memory.shape == (LARGE + 5,)
    assert not memory.any()


@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_weights_and_parameters_that_last_come_to_be_in_large_pages(
    backend: str, given: int
) -> None:
    weight, parameter = apart(FOUR_AND_A_BIT), apart(FOUR_AND_A_BIT).zero_()
    with ends(backend) as both:
        both.destinations = destinations_to({"w": parameter})
        for kib_of_weight in (0, 4 * given, 4 * given):
            weight += 1
            assert both.stream([("w", weight)])[1] == []
            assert torch.equal(parameter, weight)
            assert large_kib(parameter.data_ptr()) == 4 * given
            assert large_kib(weight.data_ptr()) == kib_of_weight


@pytest.mark.parametrize("backend", ["shm", "nixl", "auto"])
def test_all_pages_stay_as_they_are_where_that_is_asked_for(backend: str) -> None:
    weight, parameter = apart(FOUR_AND_A_BIT), apart(FOUR_AND_A_BIT).zero_()
    with ends(backend, large_pages=False) as both:
        both.destinations = destinations_to({"w": parameter})
        for _ in range(3):
            weight += 1
            assert both.stream([("w", weight)])[1] == []
            assert torch.equal(parameter, weight)
    assert [large_kib(each.data_ptr()) for each in (weight, parameter)] == [0, 0]


def test_weights_that_are_made_for_one_stream_are_left_alone() -> None:
    parameter = apart(FOUR_AND_A_BIT).zero_()
    with ends("shm") as both:
        both.destinations = destinations_to({"w": parameter})
        for _ in range(2):
            weight = apart(FOUR_AND_A_BIT)
            assert both.stream([("w", weight)])[1] == []
            assert torch.equal(parameter, weight)
            assert large_kib(weight.data_ptr()) == 0
            del weight
