"""Memory that is mapped here, and memory files mapped twice in a row, so that a ring has no end.

What begins near the end of a file and goes on at its beginning then lies in one piece: a tensor
that goes round a ring of transfer buffers needs no copy to be whole.

Rules kept here: the memory has no name in any file system; it is reserved when it is made, because
a page that cannot be had later would be a SIGBUS; it is in large pages where the kernel moves it
there, and not a byte larger for that; and it is given back when its owner says so, whoever still
has a tensor that lies there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Final

import torch

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS: Final = 0
_MAP_FIXED: Final = 0x10
_NO_RESERVE: Final = 0x4000
_NO_MEMORY: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
"""Flags of a mapping that takes no memory before it is written to."""
_FAILED: Final = ctypes.c_void_p(-1).value
_COLLAPSE: Final = 25
_POPULATE_WRITE: Final = 23
_LARGE_PAGE_BYTES: Final = 2 * 1024 * 1024
"""Memory begins at a multiple of this, which is the size of a large page on most machines."""


def reserve_file(size: int) -> int:
    """A new memory file with all its pages; its descriptor, which the caller closes.

    Raises:
        OSError: there is not enough memory.
    """
    made = os.memfd_create("rollsync", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(made, 0, size)
    except BaseException:
        os.close(made)
        raise
    return made


def can_mirror(size: int) -> bool:
    """Whether a file of that size can be mapped twice in a row."""
    return size % mmap.PAGESIZE == 0


class MappedMemory:
    """A range of addresses, and the memory that is mapped there.

    The range lasts as long as a tensor that lies there, the memory only until `release`: whoever
    keeps such a tensor, as an error does that was raised beside it, keeps no memory with it.

    Args:
        size: bytes of the range, which begins at a multiple of a large page's.

    Attributes:
        tensor: `(size,)` uint8: all of it.

    Raises:
        OSError: there is no such range.
    """

    def __init__(self, size: int) -> None:
        reserved = size + _LARGE_PAGE_BYTES
        begin = _map(None, reserved, _NO_ACCESS, _NO_MEMORY)
        self._start = -(-begin // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        mapped = (ctypes.c_uint8 * size).from_address(self._start)
        unmap = weakref.finalize(mapped, _LIBC.munmap, begin, reserved)
        # At the end of the process tensors may still lie there, and the kernel unmaps it anyway.
        unmap.atexit = False
        self.tensor = torch.frombuffer(mapped, dtype=torch.uint8)

    def put(self, first: int, size: int, flags: int, descriptor: int = -1) -> None:
        """Map `size` bytes from the range's byte `first` on.

        Args:
            flags: those of mmap(2).
            descriptor: the file that is mapped; -1: none.

        Raises:
            OSError: the kernel refuses.
        """
        _map(self._start + first, size, _READ_WRITE, flags | _MAP_FIXED, descriptor)

    def advise(self, first: int, size: int, advice: int) -> None:
        """Give the kernel an advice that nothing but speed depends on."""
        _LIBC.madvise(self._start + first, size, advice)

    def release(self) -> None:
        """Give the memory back; what lies there is zeros from now on."""
        size = len(self.tensor)
        if size:
            self.put(0, size, _NO_MEMORY)
            self.tensor = torch.empty(0, dtype=torch.uint8)


def anonymous_memory(size: int) -> MappedMemory:
    """`size` bytes of this process alone.

    Raises:
        OSError: there is not enough memory.
    """
    memory = MappedMemory(size)
    memory.put(0, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memory


def map_file(descriptor: int, size: int) -> MappedMemory:
    """The first `size` bytes of a file, and behind them the same again if `can_mirror`.

    Returns:
        `size` or `2 * size` bytes, shared with every process that maps the file. The
        descriptor may be closed.

    Raises:
        OSError: the file cannot be mapped.
    """
    places = (0, size) if can_mirror(size) else (0,)
    # The whole range is taken first, so that nothing else is where the file goes.
    mapped = MappedMemory(len(places) * size)
    try:
        for place in places:
            mapped.put(place, size, mmap.MAP_SHARED, descriptor)
    except BaseException:
        mapped.release()
        raise
    # The kernel does this or not (from Linux 6.1 and 5.14 on). It makes pages large also where
    # nobody has allowed them for shared memory. What is not in them is looked up now, so that no
    # stream waits for it.
    for advice in (_COLLAPSE, _POPULATE_WRITE):
        for place in places:
            mapped.advise(place, size, advice)
    return mapped


def _map(place: int | None, size: int, protection: int, flags: int, descriptor: int = -1) -> int:
    mapped: int | None = _LIBC.mmap(place, size, protection, flags, descriptor, 0)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno() or errno.ENOMEM
        raise OSError(code, os.strerror(code))
    return mapped
