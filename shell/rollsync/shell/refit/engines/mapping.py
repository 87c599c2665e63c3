"""Memory files mapped twice in a row, so that a ring has no end in memory.

What begins near the end of a file and goes on at its beginning then lies in one piece: a tensor
that goes round a ring of transfer buffers needs no copy to be whole.

Rules kept here: the memory has no name in any file system; it is reserved when it is made, because
a page that cannot be had later would be a SIGBUS; and it is unmapped when no tensor uses it any
more.
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
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS: Final = 0
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value


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
    start = _map(None, 2 * size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        for place in (start, start + size):
            _map(
                place,
                size,
                _READ_WRITE,
                mmap.MAP_SHARED | _MAP_FIXED | mmap.MAP_POPULATE,
                descriptor,
            )
    except BaseException:
        _LIBC.munmap(start, 2 * size)
        raise
    mapped = (ctypes.c_uint8 * (2 * size)).from_address(start)
    unmap = weakref.finalize(mapped, _LIBC.munmap, start, 2 * size)
    # At the end of the process tensors may still lie there, and the kernel unmaps it anyway.
    unmap.atexit = False
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _map(place: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _LIBC.mmap(place, size, protection, flags, descriptor, 0)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno() or errno.ENOMEM
        raise OSError(code, os.strerror(code))
    return mapped
