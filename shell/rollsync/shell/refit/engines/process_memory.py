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
import numpy.typing as npt
import torch

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
_Runs = npt.NDArray[np.uint64]
"""`(runs, 2)`: address and bytes of each."""


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
        found = ctypes.create_string_buffer(len(probe.contents))
        try:
            _read(
                _process_of(channel.connection),
                _runs([probe.address], len(probe.contents)),
                _runs([ctypes.addressof(found)], len(probe.contents)),
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
            for read in reads:
                _do(process, read)
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


def _do(process: int, read: Read) -> None:
    memory: npt.NDArray[np.uint8] = read.parameter.detach().reshape(-1).view(torch.uint8).numpy()
    base = read.parameter.data_ptr()
    for source, target, size in _slices(read.copy):
        _read(process, _runs(source + read.address, size), _runs(target + base, size))
        if read.checksum is not None:
            for start in target.tolist():
                read.checksum.update(memory[start : start + size].data)


def _slices(copy: Copy) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]]:
    """A copy in slices: where runs begin in the source and in the target, and their bytes."""
    run = min(copy.source.run_bytes, copy.target.run_bytes)
    if not run:
        return
    source, target = _starts(copy.source, run), _starts(copy.target, run)
    if run >= _SLICE_BYTES:
        for at in range(len(source)):
            for first in range(0, run, _SLICE_BYTES):
                here = slice(at, at + 1)
                yield source[here] + first, target[here] + first, min(_SLICE_BYTES, run - first)
        return
    step = min(_MOST_RUNS, _SLICE_BYTES // run)
    for at in range(0, len(source), step):
        yield source[at : at + step], target[at : at + step], run


def _starts(region: Region, run: int) -> npt.NDArray[np.int64]:
    """Where the runs of `run` bytes of a region begin."""
    stride = run if region.runs == 1 else region.stride_bytes
    return region.offset + stride * np.arange(region.total_bytes // run, dtype=np.int64)


def _runs(starts: Sequence[int] | npt.NDArray[np.int64], size: int) -> _Runs:
    runs = np.empty((len(starts), 2), dtype=np.uint64)
    runs[:, 0] = starts
    runs[:, 1] = size
    return runs


def _read(process: int, remote: _Runs, local: _Runs) -> None:
    """Read all runs.

    Raises:
        OSError: the kernel refuses, or there is no such memory.
    """
    read = _libc.process_vm_readv(
        process, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
    )
    if read < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if read != int(remote[:, 1].sum()):
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def _process_of(connection: socket.socket) -> int:
    """The process at the other end, as this one sees it; 0 when it does not."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process: int = _CREDENTIALS.unpack(given)[0]
    return process
