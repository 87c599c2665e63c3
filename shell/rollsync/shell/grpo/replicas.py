"""The policy workers of a run as replicas of one model: they meet, and add up what each has.

The sums are torch.distributed's, over gloo. Rules kept here: a sum has the same bits on every
replica, so that equal optimizers take equal steps; and nobody waits for another replica longer
than the deadline, or than the end of the other's process.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed
import xxhash
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rollsync.shell.errors import RollsyncError
from rollsync.shell.refit.engines.addresses import address_of_this_host

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable by which gloo is told the network interface to use."""
_GET_ADDRESS = 0x8915
"""Linux: asks for the IPv4 address of an interface (SIOCGIFADDR, netdevice(7))."""
_REQUEST = struct.Struct("256s")
_ADDRESS = slice(20, 24)


class ReplicaUnreachable(RollsyncError):
    """A policy worker waited for the others in vain, or one of them has left a sum."""


class Meeting(Struct, frozen=True):
    """Where the replicas meet: an address of replica 0, and its port."""

    host: str
    port: int


class Replicas:
    """One of the replicas; with only one there is nobody to meet, and a sum is what it has.

    Args:
        rank: which one, from 0.
        world_size: how many there are.
        timeout_s: longest wait for the others, when they meet and in a sum.
    """

    def __init__(self, *, rank: int = 0, world_size: int = 1, timeout_s: float = 600.0) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None

    def open(self) -> Meeting:
        """Have replica 0 listen for the others, at a free port of one address of this host."""
        host = address_of_this_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.bind((host, 0))
            listening.listen()
            port: int = listening.getsockname()[1]
            # The store closes what it is given.
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=listening.detach(),
            )
        return Meeting(host, port)

    def join(self, meeting: Meeting) -> None:
        """Meet the others.

        Raises:
            ReplicaUnreachable: not all of them came in time.
        """
        with self._waiting("did not meet the others"):
            if self._store is None:
                self._store = TCPStore(
                    meeting.host,
                    meeting.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=self._timeout,
                )
            if interface := interface_of(address_of_this_host()):
                # Without it gloo takes what the host's name stands for, often a loopback.
                os.environ.setdefault(_INTERFACE, interface)
            torch.distributed.init_process_group(
                "gloo",
                store=self._store,
                rank=self._rank,
                world_size=self._world_size,
                timeout=self._timeout,
            )

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor the sum of it over all replicas. All of them call this alike.

        Raises:
            ReplicaUnreachable: one of them is gone, or did not come in time.
        """
        if self._world_size == 1:
            return
        with self._waiting("did not hear from all others"):
            sums = [torch.distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
            for each in sums:
                if each is not None:  # Of a group that this replica is not in.
                    each.wait()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ReplicaUnreachable(
                f"policy worker {self._rank} of {self._world_size} {what}: {reason}",
                remedy="see Ray's logs of the other policy workers and the network between their"
                f" nodes ({_INTERFACE} chooses an interface); raise cluster.collective_timeout_s"
                " only if one of them was merely slow",
            ) from error


def weights_digest(module: torch.nn.Module) -> str:
    """XXH3 of all weights' bytes, in order, in hexadecimal: equal exactly for equal bits."""
    digest = xxhash.xxh3_128()
    for parameter in module.parameters():
        content = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if _address_of(name, asking) == address), None)


def _address_of(interface: str, asking: socket.socket) -> str | None:
    """The IPv4 address of an interface, if it has one."""
    try:
        answer = fcntl.ioctl(asking, _GET_ADDRESS, _REQUEST.pack(interface.encode()))
    except OSError:
        return None
    return socket.inet_ntoa(answer[_ADDRESS])
