"""Large pages for memory that another process reads through the kernel, which looks up each page.

Memory of this package's own is asked for in large pages. That of a trainer's weights and of an
engine's parameters is there already, mostly in ordinary pages: the kernel can move these together
(`MADV_COLLAPSE`, Linux 6.1), which takes some milliseconds for one large page, once.

Rules kept here: what is in memory stays as it is, and nothing but speed is lost where the kernel
refuses; only memory that outlives a stream is worth it; every page that is moved holds bytes of
such memory, and is there and this process's alone already, so that no more memory is needed; and
no stream waits for it for longer than it was told.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rollsync.shell.refit.engines.mapping import MappedMemory, anonymous_memory

MOST_BYTES: Final = 512 << 20
"""How much memory is moved before one stream; the rest waits for the next ones."""

_PAGE: Final = mmap.PAGESIZE
_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_PAGES: Final = Path("/proc/self/pagemap")
# An entry of the file has 8 bytes; what is asked is Documentation/admin-guide/mm/pagemap.rst's
# "present", "exclusively mapped", and "file-page or shared-anon".
_ENTRY_BYTES: Final = 8
_PRESENT: Final = 1 << 63
_OF_FILE: Final = 1 << 61
_EXCLUSIVE: Final = 1 << 56
_COLLAPSE: Final = 25
_NO_MEMORY: Final = {errno.ENOMEM, errno.EBUSY}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def memory_in_large_pages(size: int) -> MappedMemory:
    """`size` bytes of this process alone, in large pages where the kernel gives them."""
    memory = anonymous_memory(size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.advise(0, size, mmap.MADV_HUGEPAGE)
    # Writing makes the pages, so that no stream waits for them.
    memory.tensor.zero_()
    return memory


class _Noted(NamedTuple):
    """A tensor whose pages are to be large."""

    storage: StorageWeakRef
    pages: range
    """Those that hold bytes of it, by number."""


class LargePages:
    """Makes the pages of tensors large that last from one stream to the next."""

    def __init__(self) -> None:
        self._large = _large_page()
        """How many pages a large one is; 0: there are none."""
        self._noted: dict[int, _Noted] = {}
        """By first address."""
        self._tried: set[int] = set()
        """The large pages that there are now, by number, and those that the kernel refuses."""
        self._has_new = False

    def note(self, tensor: torch.Tensor) -> None:
        """Remember a tensor, which is contiguous: its pages become large if it is still there when
        `enlarge` is called."""
        address, size = tensor.data_ptr(), tensor.nbytes
        # What is smaller has no page to itself.
        if size < _PAGE or address in self._noted or not self._large or not tensor.is_cpu:
            return
        pages = range(address // _PAGE, (address + size - 1) // _PAGE + 1)
        self._noted[address] = _Noted(StorageWeakRef(tensor.untyped_storage()), pages)
        self._has_new = True

    def are_due(self) -> bool:
        """Whether there is anything to do for `enlarge`."""
        self._forget_gone()
        self._has_new = self._has_new and any(True for _ in self._due())
        return self._has_new

    async def enlarge(self, most_s: float) -> None:
        """Make pages large, those with the lowest addresses first, as far as the bounds allow.

        Args:
            most_s: how long it may take, in seconds.
        """
        if not self.are_due():
            return
        end = time.monotonic() + most_s
        left = MOST_BYTES // (self._large * _PAGE)
        with _page_map() as page_map:
            for number in list(self._due()):
                if not left or time.monotonic() > end:
                    return
                if _is_own(page_map, number * self._large, self._large):
                    if not _collapse(number * self._large * _PAGE, self._large * _PAGE):
                        return
                    left -= 1
                self._tried.add(number)
                # One takes milliseconds.
                await asyncio.sleep(0)
        self._has_new = False

    def _due(self) -> Iterator[int]:
        """The large pages that could be made, by number: noted tensors cover all their pages."""
        runs = sorted((each.pages.start, each.pages.stop) for each in self._noted.values())
        first = last = 0
        for start, stop in [*runs, (1 << 64, 1 << 64)]:
            if start > last:
                yield from self._untried(first, last)
                first = start
            last = max(last, stop)

    def _untried(self, first: int, last: int) -> Iterator[int]:
        for number in range(-(-first // self._large), last // self._large):
            if number not in self._tried:
                yield number

    def _forget_gone(self) -> None:
        for address, noted in list(self._noted.items()):
            if noted.storage.expired():
                del self._noted[address]
                start, stop = noted.pages.start // self._large, -(-noted.pages.stop // self._large)
                self._tried.difference_update(range(start, stop))


def _large_page() -> int:
    try:
        return int(_SIZE.read_text()) // _PAGE
    except (OSError, ValueError):
        return 0


@contextmanager
def _page_map() -> Iterator[int | None]:
    """What the kernel says of this process's pages, if it does."""
    try:
        opened = os.open(_PAGES, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield opened
    finally:
        os.close(opened)


def _is_own(page_map: int | None, first: int, count: int) -> bool:
    """Whether pages are in memory, belong to no file, and to no other process either.

    Of others a copy would be made, and pages that are not there would be.
    """
    if page_map is None:
        return False
    try:
        found = os.pread(page_map, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
    except OSError:
        return False
    entries = array.array("Q", found)
    asked = _PRESENT | _OF_FILE | _EXCLUSIVE
    return len(entries) == count and all(
        entry & asked == _PRESENT | _EXCLUSIVE for entry in entries
    )


def _collapse(address: int, size: int) -> bool:
    """Ask for a large page; False when there is no memory for one now."""
    return not (_libc.madvise(address, size, _COLLAPSE) and ctypes.get_errno() in _NO_MEMORY)
