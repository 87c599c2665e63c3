"""Where a receiver listens, and how a sender gets there.

Rules kept here: an endpoint is bound to one address, with a port or name that nobody chose before;
and names lie in no file system, so that a killed job leaves none.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass

from rollsync.shell.refit.errors import RefitConfigurationError

_BACKLOG = 128
_RETRY_S = 0.005
_SECRET_BYTES = 32
_LOCAL, _TCP = "local:", "tcp:"
_OTHERS = ("192.0.2.1", "2001:db8::1", "127.0.0.1", "::1")
"""Where a route is asked for: two addresses that nobody has, and this host's own."""
_ANY_PORT = 9


@dataclass(frozen=True)
class Listener:
    """Where a receiver waits for its sender, and the secret that admits it."""

    endpoint: socket.socket
    address: str
    secret: bytes

    @classmethod
    def on_this_host(cls) -> Listener:
        """Listen at a new random abstract address, for processes of this host."""
        name = f"rollsync-{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(b"\0" + name.encode())
        return cls._listening(listening, _LOCAL + name)

    @classmethod
    def on_network(cls, host: str) -> Listener:
        """Listen at a free port of one address of this host.

        Args:
            host: an IPv4 or IPv6 address of this host.
        """
        version = ipaddress.ip_address(host).version
        listening = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET)
        try:
            listening.bind((host, 0))
        except BaseException:
            listening.close()
            raise
        port: int = listening.getsockname()[1]
        return cls._listening(listening, f"{_TCP}{port}:{host}")

    @classmethod
    def _listening(cls, listening: socket.socket, address: str) -> Listener:
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        return cls(listening, address, secrets.token_bytes(_SECRET_BYTES))

    async def accept(self) -> socket.socket:
        """The next connection, non-blocking."""
        connection, _ = await asyncio.get_running_loop().sock_accept(self.endpoint)
        _prepare(connection)
        return connection

    def close(self) -> None:
        """Stop listening."""
        self.endpoint.close()


async def connect(address: str) -> socket.socket:
    """A non-blocking connection to a listener's address.

    Raises:
        OSError: nobody listens there.
    """
    loop = asyncio.get_running_loop()
    connection, target = socket_towards(address)
    try:
        _prepare(connection)
        if isinstance(target, bytes):
            await _connect_locally(connection, target)
        else:
            await loop.sock_connect(connection, target)
    except BaseException:
        connection.close()
        raise
    return connection


def listen_at(bind_address: str | None) -> Listener:
    """Listen at a free port of an address of this host; None: that by which others reach it.

    Raises:
        RefitConfigurationError: it is no address of this host.
    """
    if bind_address is None:
        return Listener.on_network(address_of_this_host())
    try:
        return Listener.on_network(bind_address)
    except (OSError, ValueError) as error:
        raise RefitConfigurationError(
            f"bind_address is {bind_address!r}, where this host cannot listen: {error}",
            remedy="give an IPv4 or IPv6 address of this host, or leave it out",
        ) from error


def socket_towards(address: str) -> tuple[socket.socket, bytes | tuple[str, int]]:
    """A new socket for a listener's address, and what to connect it to."""
    if address.startswith(_LOCAL):
        name = b"\0" + address.removeprefix(_LOCAL).encode()
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), name
    port, _, host = address.removeprefix(_TCP).partition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM), (host, int(port))


async def _connect_locally(connection: socket.socket, name: bytes) -> None:
    # A full backlog is EAGAIN here, and unlike over TCP no connection is under way then.
    while (code := connection.connect_ex(name)) == errno.EAGAIN:
        await asyncio.sleep(_RETRY_S)
    if code:
        raise OSError(code, os.strerror(code))


def address_of_this_host() -> str:
    """The address by which other hosts reach this one, of IPv4 if it has one, else of IPv6.

    A host without any route has only its loopback.

    Raises:
        OSError: not even that.
    """
    own = (_own_address_towards(other) for other in _OTHERS)
    found = next((address for address in own if address), None)
    if found is None:
        raise OSError(errno.EADDRNOTAVAIL, "this host has no network address, not even a loopback")
    return found


def _own_address_towards(other: str) -> str | None:
    """From which address this host would send there, which asks for a route and sends nothing."""
    family = socket.AF_INET6 if ipaddress.ip_address(other).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, _ANY_PORT))
            found: str = probe.getsockname()[0]
    except OSError:
        return None
    return found


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
