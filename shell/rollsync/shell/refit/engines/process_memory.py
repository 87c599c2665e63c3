"""Reading another process's memory on this host: one copy, from a tensor to a parameter.

Rules kept here: whose memory is read is what the kernel says of the connection's other end; only
announced bytes are read; and where the kernel does not allow it, `meet` answers no and nothing is
lost but speed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
import xxhash

from rollsync.pure.refit.control import MemoryKind, ProbeOffered, TensorsOffered
from rollsync.pure.refit.load_plan import Copy, Region
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import Read

logger = logging.getLogger(__name__)

_SLICE_BYTES: Final = 1 << 20
"""Read at once: what is hashed then is still in the processor's cache."""
_MOST_RUNS: Final = 1024
"""The kernel's limit for one call."""
_PROBE_BYTES: Final = 16
_PTRACER: Final = 0x59616D61
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_CREDENTIALS: Final = struct.Struct("3i")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


class OwnMemory:
    """This process's memory, as receivers on this host read it."""

    memory: MemoryKind = "DRAM"
    device = 0

    def __init__(self) -> None:
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_BYTES), _PROBE_BYTES)
        self._admitted: set[int] = set()

    def admit(self, channel: ControlChannel) -> None:
        """Let the receiver read where the Yama security module would forbid it."""
        if not _YAMA.exists():
            return
        self._admitted.add(_process_of(channel.connection))
        # The kernel takes one process; for several it has to be every one of this user.
        tracer = next(iter(self._admitted)) if len(self._admitted) == 1 else -1
        _libc.prctl(_PTRACER, ctypes.c_ulong(tracer & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)

    def probe(self) -> ProbeOffered:
        """Some random bytes of this process's."""
        return ProbeOffered(
            agent=None, address=ctypes.addressof(self._probe), contents=self._probe.raw
        )

    def can_expose(self, tensor: torch.Tensor) -> bool:
        """Any ordinary tensor in this host's memory."""
        return (
            tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.nbytes > 0
        )

    def expose(self, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Nothing to do."""
        return None

    def withdraw(self) -> None:
        """Let nobody read any more."""
        if self._admitted:
            self._admitted.clear()
            _libc.prctl(_PTRACER, ctypes.c_ulong(0), 0, 0, 0)

    def release(self) -> None:
        """Nothing is reserved."""


class OtherMemory:
    """The memory of the process at the other end of a connection."""

    def can_write(self, parameter: torch.Tensor) -> bool:
        """Whether it is in this host's memory."""
        return parameter.device.type == "cpu"

    async def meet(self, channel: ControlChannel, probe: ProbeOffered) -> bool:
        """Whether the probe can be read."""
        size = len(probe.contents)
        found = ctypes.create_string_buffer(size)
        try:
            read_memory(
                _process_of(channel.connection),
                [(probe.address, size)],
                [(ctypes.addressof(found), size)],
            )
        except OSError as error:
            logger.warning(
                "%s: the memory of %s cannot be read (%s): its tensors come through buckets",
                channel.rank,
                channel.peer,
                error.strerror,
            )
            return False
        return found.raw == probe.contents

    async def read(
        self, channel: ControlChannel, offered: TensorsOffered, reads: Sequence[Read]
    ) -> None:
        """Do these reads.

        Raises:
            PeerLost: the sender is gone.
            PeerRefused: it has no such memory.
        """
        process = _process_of(channel.connection)
        try:
            batch = _Batch(process)
            for read in reads:
                batch.add(read)
            batch.flush()
        except OSError as error:
            if error.errno == errno.ESRCH or channel.has_ended():
                raise channel.lost() from error
            raise channel.refused(
                f"an offer of memory that cannot be read ({error.strerror})"
            ) from error
        if channel.has_ended():
            # Its number may be another process's by now.
            raise channel.lost()

    def release(self) -> None:
        """Nothing is reserved."""


class _Batch:
    """Reads that the kernel is asked for at once, and then hashed while they are in the cache."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._remote: list[tuple[int, int]] = []
        self._local: list[tuple[int, int]] = []
        self._hashed: list[tuple[xxhash.xxh3_64, memoryview]] = []
        self._bytes = 0

    def add(self, read: Read) -> None:
        """Do a read, now or with the next ones."""
        base = read.parameter.data_ptr()
        flat: torch.Tensor = read.parameter.detach().reshape(-1)
        contents: memoryview = flat.view(torch.uint8).numpy().data
        for source, target, size in _pieces(read.copy):
            if len(self._remote) == _MOST_RUNS or self._bytes + size > _SLICE_BYTES:
                self.flush()
            self._remote.append((read.address + source, size))
            self._local.append((base + target, size))
            self._bytes += size
            if read.checksum is not None:
                self._hashed.append((read.checksum, contents[target : target + size]))

    def flush(self) -> None:
        """Do what was added.

        Raises:
            OSError: the kernel refuses, or there is no such memory.
        """
        if self._remote:
            read_memory(self._process, self._remote, self._local)
        for checksum, contents in self._hashed:
            checksum.update(contents)
        self._remote.clear()
        self._local.clear()
        self._hashed.clear()
        self._bytes = 0


def _pieces(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """A copy in pieces: where each begins in the source and in the target, and its bytes."""
    run = min(copy.source.run_bytes, copy.target.run_bytes)
    if not run:
        return
    source, target = copy.source.offset, copy.target.offset
    for _ in range(copy.source.total_bytes // run):
        for first in range(0, run, _SLICE_BYTES):
            yield source + first, target + first, min(_SLICE_BYTES, run - first)
        source += _stride(copy.source, run)
        target += _stride(copy.target, run)


def _stride(region: Region, run: int) -> int:
    return run if region.runs == 1 else region.stride_bytes


def read_memory(
    process: int, remote: Sequence[tuple[int, int]], local: Sequence[tuple[int, int]]
) -> None:
    """Read another process's memory.

    Args:
        process: its number.
        remote: address and bytes of each run there, as many as the kernel takes at once.
        local: the same here.

    Raises:
        OSError: the kernel refuses, or there is no such memory.
    """
    theirs, ours = np.array(remote, dtype=np.uint64), np.array(local, dtype=np.uint64)
    read = _libc.process_vm_readv(
        process, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0
    )
    if read < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if read != int(theirs[:, 1].sum()):
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def _process_of(connection: socket.socket) -> int:
    """The process at the other end, as this one sees it; 0 when it does not."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process: int = _CREDENTIALS.unpack(given)[0]
    return process
