"""Memory files mapped twice in a row, so that a ring has no end in memory.

What begins near the end of a file and goes on at its beginning then lies in one piece: a tensor
that goes round a ring of transfer buffers needs no copy to be whole.

Rules kept here: the memory has no name in any file system; it is reserved when it is made, because
a page that cannot be had later would be a SIGBUS; it is in large pages where the kernel moves it
there, and not a byte larger for that; and it is unmapped when no tensor uses it any more.
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


def map_file(descriptor: int, size: int) -> torch.Tensor:
    """The first `size` bytes of a file, and behind them the same again if `can_mirror`.

    Returns:
        `(size,)` or `(2 * size,)` uint8, shared with every process that maps the file. The
        descriptor may be closed.

    Raises:
        OSError: the file cannot be mapped.
    """
    if not can_mirror(size):
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    # The whole range is taken first, so that nothing else is where the file goes.
    reserved = 2 * size + _LARGE_PAGE_BYTES
    begin = _map(None, reserved, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-begin // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    try:
        for place in (start, start + size):
            _map(place, size, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except BaseException:
        _LIBC.munmap(begin, reserved)
        raise
    # The kernel does this or not (from Linux 6.1 and 5.14 on), and nothing but speed depends on it.
    # It makes pages large also where nobody has allowed them for shared memory. What is not in
    # them is looked up now, so that no stream waits for it.
    for advice in (_COLLAPSE, _POPULATE_WRITE):
        for place in (start, start + size):
            _LIBC.madvise(place, size, advice)
    mapped = (ctypes.c_uint8 * (2 * size)).from_address(start)
    unmap = weakref.finalize(mapped, _LIBC.munmap, begin, reserved)
    # At the end of the process tensors may still lie there, and the kernel unmaps it anyway.
    unmap.atexit = False
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _map(place: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _LIBC.mmap(place, size, protection, flags, descriptor, 0)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno() or errno.ENOMEM
        raise OSError(code, os.strerror(code))
    return mapped
