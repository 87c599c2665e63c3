"""Jobs on one host at the same time, after one that was killed, and on a host without IPv4."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from rollsync.shell.refit.engines.addresses import Listener, address_of_this_host, connect
from rollsync.shell.refit.engines.conformance_workers import Rollouts, sample_weights
from tests.shell.refit.engines.peers import Peer, engine_of, receive_all


@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_two_jobs_at_once_keep_to_themselves(backend: str) -> None:
    with Rollouts(backend, {}, 1) as one, Rollouts(backend, {}, 1) as other:
        for job in (one, other):
            job.begin()

        async def both() -> None:
            await asyncio.gather(
                *(job.policy.send_weights(sample_weights().items()) for job in (one, other))
            )

        asyncio.run(both())
        for job in (one, other):
            (answer,) = job.answers()
            assert (sorted(answer.names), answer.error) == (sorted(sample_weights()), "")


@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_nobody_is_left_to_listen_for_a_killed_job(backend: str) -> None:
    engine = engine_of(backend, 10_000)
    killed = Peer(
        engine, backend=backend, role="policy", timeout_s=10_000, die="makes three_buckets"
    )
    with pytest.raises(ConnectionError):
        asyncio.run(receive_all(engine))
    killed.wait_until_killed()
    killed.close()
    engine.finalize()
    for address in ("address", "lifeline"):
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(connect(str(killed.metadata[address])))


def test_a_host_without_ipv4_is_reached_by_its_ipv6_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ipv6Only(socket.socket):
        def __init__(
            self, family: int = -1, kind: int = -1, proto: int = -1, fileno: int | None = None
        ) -> None:
            if family == socket.AF_INET:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, kind, proto, fileno)

    monkeypatch.setattr(socket, "socket", Ipv6Only)
    found = address_of_this_host()
    assert ":" in found
    listener = Listener.on_network(found)

    async def meet() -> bytes:
        loop = asyncio.get_running_loop()
        ours = await connect(listener.address)
        theirs = await listener.accept()
        await loop.sock_sendall(theirs, b"hello")
        heard = await loop.sock_recv(ours, 5)
        ours.close()
        theirs.close()
        return heard

    assert asyncio.run(meet()) == b"hello"
    listener.close()
