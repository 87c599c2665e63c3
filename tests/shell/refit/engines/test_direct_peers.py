"""What a direct receiver and its sender, two processes, make of each other's death, of offers that
were never agreed on, and of a kernel that lets neither read the other's memory."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from rollsync.pure.refit.control import (
    ControlBody,
    OfferedTensor,
    StreamAccepted,
    TensorHashed,
    TensorsOffered,
)
from rollsync.shell.refit.engines import CheckpointEngine
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.conformance_workers import sample_weights
from rollsync.shell.refit.engines.direct_sending import DirectSender
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from tests.shell.refit.engines.footprint import Footprint, without_collector
from tests.shell.refit.engines.moments import DIRECT_QUICK, DIRECT_RECEIVER, DIRECT_SENDER
from tests.shell.refit.engines.peers import (
    DIRECT,
    Peer,
    engine_of,
    read_samples_into,
    receive_all,
    warm_up,
)

DEADLINE_S = 10_000.0
BATCHED = sorted(set(sample_weights()) - set(DIRECT))
_NOBODY = 65534
_PR_SET_DUMPABLE = 4


def cases(moments: Iterable[str]) -> pytest.MarkDecorator:
    """Every moment with every way; the agents of NIXL take their time to start."""
    return pytest.mark.parametrize(
        ("backend", "moment"),
        [
            pytest.param(
                backend,
                moment,
                marks=[pytest.mark.slow]
                if backend == "nixl" and moment not in DIRECT_QUICK
                else [],
            )
            for backend in ("shm", "nixl")
            for moment in moments
        ],
    )


@pytest.fixture
def engine(backend: str) -> Iterator[CheckpointEngine]:
    """This process's end, which leaves nothing behind whatever became of the other one."""
    warm_up(backend)
    with without_collector():
        before = Footprint.now()
        engine = engine_of(backend, DEADLINE_S, direct=True)
        yield engine
        engine.finalize()
        assert before.at_last() == before


def nothing() -> None:
    """No habit."""


def peer(
    engine: CheckpointEngine,
    backend: str,
    role: str,
    die: str = "",
    habit: Callable[[], None] = nothing,
) -> Peer:
    return Peer(
        engine,
        backend=backend,
        role=role,
        timeout_s=DEADLINE_S,
        die=die,
        direct=True,
        habit=habit,
    )


def is_read(parameters: dict[str, torch.Tensor]) -> bool:
    samples = sample_weights()
    return all(torch.equal(parameters[name], samples[name]) for name in DIRECT)


@cases(DIRECT_RECEIVER)
def test_a_killed_receiver_is_noticed_and_a_new_one_reads_everything(
    engine: CheckpointEngine, backend: str, moment: str
) -> None:
    killed = peer(engine, backend, "rollout", moment)
    with pytest.raises(PeerLost, match=r"policy 0, while it .*rollout 0"):
        asyncio.run(engine.send_weights(sample_weights().items()))
    killed.wait_until_killed()
    killed.close()
    engine.finalize()
    fresh = peer(engine, backend, "rollout")
    asyncio.run(engine.send_weights(sample_weights().items()))
    fresh.wait_until_done()
    fresh.close()


def check_a_new_sender_is_read_from(engine: CheckpointEngine, backend: str) -> None:
    fresh = peer(engine, backend, "policy")
    parameters = read_samples_into(engine)
    assert sorted(asyncio.run(receive_all(engine))) == BATCHED
    assert is_read(parameters)
    fresh.wait_until_done()
    fresh.close()


@cases(DIRECT_SENDER)
def test_a_killed_sender_is_noticed_and_a_new_one_is_read_from(
    engine: CheckpointEngine, backend: str, moment: str
) -> None:
    killed = peer(engine, backend, "policy", moment)
    read_samples_into(engine)
    with pytest.raises(PeerLost, match="rollout 0, while it"):
        asyncio.run(receive_all(engine))
    killed.wait_until_killed()
    killed.close()
    check_a_new_sender_is_read_from(engine, backend)


class Liar:
    """Makes the sender of its process offer something else, from its second offer on.

    Args:
        field: of the offer, or of its first tensor.
        value: what it says there.
        begins: the index of the offer with which it begins.
    """

    def __init__(self, field: str, value: object, begins: int = 1) -> None:
        self._changes = {field: value}
        self._of_offer = field in TensorsOffered.__struct_fields__
        self._begins = begins

    def __call__(self) -> None:
        original = DirectSender._offer_for

        def offer_for(*args: object) -> TensorsOffered:
            offer: TensorsOffered = original(*args)  # type: ignore[arg-type]
            if offer.offer < self._begins:
                return offer
            if self._of_offer:
                return msgspec.structs.replace(offer, **self._changes)
            changed: OfferedTensor = msgspec.structs.replace(offer.tensors[0], **self._changes)
            return msgspec.structs.replace(offer, tensors=(changed, *offer.tensors[1:]))

        DirectSender._offer_for = offer_for  # type: ignore[method-assign, assignment]


class LateLiar:
    """Makes the sender of its process say something else instead of a late checksum."""

    def __init__(self, body: ControlBody) -> None:
        self._body = body

    def __call__(self) -> None:
        send = ControlChannel.send

        async def sends(channel: ControlChannel, body: ControlBody) -> bytes:
            return await send(channel, self._body if isinstance(body, TensorHashed) else body)

        for name, method in (("send", sends),):
            setattr(ControlChannel, name, method)


UNREADABLE = "memory that cannot be read"


@pytest.mark.parametrize(
    ("backend", "lie", "what"),
    [
        ("shm", Liar("address", 4096), UNREADABLE),
        ("shm", Liar("address", 1 << 62), UNREADABLE),
        ("shm", Liar("address", (1 << 63) - 1), UNREADABLE),
        ("shm", Liar("address", (1 << 64) - 1), "malformed"),
        ("shm", Liar("address", -4096), "malformed"),
        ("shm", Liar("size_bytes", 1), "other size"),
        ("shm", Liar("size_bytes", 1 << 40), "other size"),
        ("shm", Liar("name", "three_bf16"), "repeated"),
        ("shm", Liar("name", "bucket"), "unknown"),
        ("shm", Liar("checksum", None, begins=0), "no checksum"),
        ("shm", Liar("checksum", "0" * 16), "has checksum"),
        ("shm", Liar("memory", "VRAM"), "not this host's"),
        ("shm", Liar("device", 1), "not this host's"),
        ("shm", Liar("agent", b"agent"), "not this host's"),
        ("shm", Liar("offer", 7), "unexpected message"),
        ("shm", LateLiar(TensorHashed(offer=0, checksum="0" * 16)), "unexpected message"),
        ("shm", LateLiar(TensorHashed(offer=1, checksum="0" * 16)), "has checksum"),
        ("shm", LateLiar(StreamAccepted()), "unexpected message"),
        ("nixl", Liar("address", 4096), UNREADABLE),
        ("nixl", Liar("address", (1 << 63) - 1), UNREADABLE),
        ("nixl", Liar("memory", "VRAM"), UNREADABLE),
        ("nixl", Liar("device", 1), UNREADABLE),
        ("nixl", Liar("agent", b"agent"), UNREADABLE),
        ("nixl", Liar("size_bytes", 1 << 40), "other size"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_offer_that_was_not_agreed_on_is_refused(
    engine: CheckpointEngine, backend: str, lie: Callable[[], None], what: str
) -> None:
    sender = peer(engine, backend, "policy", habit=lie)
    read_samples_into(engine)
    with pytest.raises(PeerRefused, match=what):
        asyncio.run(receive_all(engine))
    sender.process.join(30)
    assert sender.process.exitcode == 1
    sender.close()
    check_a_new_sender_is_read_from(engine, backend)


def hide_memory() -> None:
    """Let no process without privileges read this one's memory."""
    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("the kernel does not hide this process's memory")


@contextmanager
def unprivileged() -> Iterator[None]:
    """This process as one that may not read what others hide."""
    if os.geteuid():
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        # The kernel has hidden this process's memory with that; the next tests read it.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


@pytest.mark.parametrize("backend", ["shm"])
def test_what_the_kernel_does_not_let_read_comes_through_buckets(
    engine: CheckpointEngine, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender = peer(engine, backend, "policy", habit=hide_memory)
    parameters = read_samples_into(engine)
    with unprivileged(), caplog.at_level(logging.WARNING):
        names = asyncio.run(receive_all(engine))
    assert sorted(names) == sorted(sample_weights())
    assert not any(each.any() for each in parameters.values())
    assert "the memory of policy 0 cannot be read (Operation not permitted)" in caplog.text
    assert "its tensors come through buckets" in caplog.text
    sender.wait_until_done()
    sender.close()
