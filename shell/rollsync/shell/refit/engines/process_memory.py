"""Reading another process's memory on this host: one copy, from a tensor to a parameter.

Rules kept here: whose memory is read is what the kernel says of the connection's other end; only
announced bytes are read; and where the kernel does not allow it, `meet` answers no and nothing is
lost but speed.
"""

from __future__ import annotations

import array
import ctypes
import errno
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from rollsync.pure.refit.control import ProbeOffered, TensorsOffered
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import HOST, DirectWay, MemoryPlace
from rollsync.shell.refit.engines.direct_reads import ReadBatch
from rollsync.shell.refit.engines.rings import is_plain

logger = logging.getLogger(__name__)

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


def process_memory() -> DirectWay:
    """The way between processes of one host."""
    return DirectWay(OwnMemory(), OtherMemory())


class OwnMemory:
    """This process's memory, as receivers on this host read it."""

    def __init__(self) -> None:
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE_BYTES), _PROBE_BYTES)
        self._admitted: set[int] = set()

    def begin(self) -> None:
        """Nothing to do."""

    def admit(self, channel: ControlChannel) -> ProbeOffered:
        """Let the receiver read where the Yama security module would forbid it."""
        if _YAMA.exists():
            self._admitted.add(_process_of(channel.connection))
            # The kernel takes one process; for several it has to be every one of this user.
            tracer = next(iter(self._admitted)) if len(self._admitted) == 1 else -1
            _libc.prctl(_PTRACER, ctypes.c_ulong(tracer & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)
        return ProbeOffered(
            agent=None, address=ctypes.addressof(self._probe), contents=self._probe.raw
        )

    def declined(self, channel: ControlChannel) -> None:
        """It was told nothing."""

    def place_of(self, tensor: torch.Tensor) -> MemoryPlace | None:
        """Any ordinary tensor in this host's memory can be read as it is."""
        return HOST if tensor.is_cpu and is_plain(tensor) else None

    def news_for(self, channel: ControlChannel) -> bytes | None:
        """An address is all that a receiver needs."""
        return None

    def settle(self) -> None:
        """Nothing is kept."""

    def withdraw(self, *, failed: bool) -> None:
        """Let nobody read any more."""
        if self._admitted:
            self._admitted.clear()
            _libc.prctl(_PTRACER, ctypes.c_ulong(0), 0, 0, 0)

    def release(self) -> None:
        """Nothing is reserved."""


class OtherMemory:
    """The memory of the process at the other end of a connection."""

    slice_bytes = 2 << 20
    unhashed_slice_bytes = 32 << 20
    most_runs = 1024
    """The kernel's limit for one call."""

    def __init__(self) -> None:
        self._process = 0
        """Whose memory is read for the newest offer."""

    async def meet(
        self, channel: ControlChannel, probe: ProbeOffered, parameters: Sequence[torch.Tensor]
    ) -> bool:
        """Whether the probe can be read, and the parameters are in this host's memory."""
        if not all(each.is_cpu for each in parameters):
            return False
        size = len(probe.contents)
        found = ctypes.create_string_buffer(size)
        try:
            read_memory(
                _process_of(channel.connection),
                [probe.address, size],
                [ctypes.addressof(found), size],
            )
        except OSError as error:
            logger.warning(
                "%s: the memory of %s cannot be read (%s): its tensors come through buckets",
                channel.worker,
                channel.peer,
                error.strerror,
            )
            return False
        return found.raw == probe.contents

    def look_at(self, channel: ControlChannel, offered: TensorsOffered) -> None:
        """Check that it is memory of this host."""
        if MemoryPlace(offered.memory, offered.device) != HOST or offered.agent is not None:
            raise channel.refused("an offer of memory that is not this host's")
        self._process = _process_of(channel.connection)

    def start(self, channel: ControlChannel, offered: TensorsOffered, batch: ReadBatch) -> None:
        """Read.

        Raises:
            PeerFailed: the sender gave up.
            PeerLost: it is gone.
            PeerRefused: it has no such memory.
        """
        try:
            read_memory(self._process, batch.remote, batch.local)
        except OSError as error:
            channel.take_in()
            if error.errno == errno.ESRCH:
                raise channel.lost() from error
            raise channel.refused(
                f"an offer of memory that cannot be read ({error.strerror})"
            ) from error

    def release(self) -> None:
        """Nothing is reserved."""


def read_memory(process: int, remote: Sequence[int], local: Sequence[int]) -> None:
    """Read another process's memory.

    Args:
        process: its number.
        remote: address and bytes of each run there, in turn, as many runs as the kernel takes at
            once.
        local: the same here.

    Raises:
        OSError: the kernel refuses, or there is no such memory.
    """
    theirs, ours = array.array("Q", remote), array.array("Q", local)
    read = _libc.process_vm_readv(
        process,
        ours.buffer_info()[0],
        len(ours) // 2,
        theirs.buffer_info()[0],
        len(theirs) // 2,
        0,
    )
    if read < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if read != sum(remote[1::2]):
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def _process_of(connection: socket.socket) -> int:
    """The process at the other end, as this one sees it; 0 when it does not."""
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process: int = _CREDENTIALS.unpack(given)[0]
    return process
