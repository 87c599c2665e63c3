"""What a direct receiver and its sender, two processes, make of each other's death, of offers that
were never agreed on, and of a kernel that lets neither read the other's memory."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from rollsync.pure.refit.control import OfferedTensor, TensorsOffered
from rollsync.shell.refit.engines import CheckpointEngine
from rollsync.shell.refit.engines.conformance_workers import sample_weights
from rollsync.shell.refit.engines.direct_sending import DirectSender
from rollsync.shell.refit.engines.errors import PeerLost, PeerRefused
from tests.shell.refit.engines.footprint import Footprint
from tests.shell.refit.engines.moments import DIRECT_RECEIVER, DIRECT_SENDER
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


@pytest.fixture
def engine() -> Iterator[CheckpointEngine]:
    """This process's end, which leaves nothing behind whatever became of the other one."""
    warm_up("shm")
    before = Footprint.now()
    engine = engine_of("shm", DEADLINE_S, direct=True)
    yield engine
    engine.finalize()
    assert Footprint.now() == before


def peer(engine: CheckpointEngine, role: str, die: str = "") -> Peer:
    return Peer(engine, backend="shm", role=role, timeout_s=DEADLINE_S, die=die, direct=True)


def is_read(parameters: dict[str, torch.Tensor]) -> bool:
    samples = sample_weights()
    return all(torch.equal(parameters[name], samples[name]) for name in DIRECT)


@pytest.mark.parametrize("moment", DIRECT_RECEIVER)
def test_a_killed_receiver_is_noticed_and_a_new_one_reads_everything(
    engine: CheckpointEngine, moment: str
) -> None:
    killed = peer(engine, "rollout", moment)
    with pytest.raises(PeerLost, match=r"policy 0, while it .*rollout 0"):
        asyncio.run(engine.send_weights(sample_weights().items()))
    killed.wait_until_killed()
    killed.close()
    engine.finalize()
    fresh = peer(engine, "rollout")
    asyncio.run(engine.send_weights(sample_weights().items()))
    fresh.wait_until_done()
    fresh.close()


def check_a_new_sender_is_read_from(engine: CheckpointEngine) -> None:
    engine.finalize()
    fresh = peer(engine, "policy")
    parameters = read_samples_into(engine)
    assert sorted(asyncio.run(receive_all(engine))) == BATCHED
    assert is_read(parameters)
    fresh.wait_until_done()
    fresh.close()


@pytest.mark.parametrize("moment", DIRECT_SENDER)
def test_a_killed_sender_is_noticed_and_a_new_one_is_read_from(
    engine: CheckpointEngine, moment: str
) -> None:
    killed = peer(engine, "policy", moment)
    read_samples_into(engine)
    with pytest.raises(PeerLost, match="rollout 0, while it"):
        asyncio.run(receive_all(engine))
    killed.wait_until_killed()
    killed.close()
    check_a_new_sender_is_read_from(engine)


class Liar:
    """Makes the sender of its process offer something else, from its second offer on.

    Args:
        field: of the first tensor that it offers.
        value: what it says there.
    """

    def __init__(self, field: str, value: object) -> None:
        self._changes = {field: value}

    def __call__(self) -> None:
        original = DirectSender._offer_for

        def offer_for(*args: object) -> TensorsOffered:
            offer: TensorsOffered = original(*args)  # type: ignore[arg-type]
            if offer.offer:
                changed: OfferedTensor = msgspec.structs.replace(offer.tensors[0], **self._changes)
                return msgspec.structs.replace(offer, tensors=(changed, *offer.tensors[1:]))
            return offer

        DirectSender._offer_for = offer_for  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (Liar("address", 4096), "memory that cannot be read"),
        (Liar("address", 1 << 62), "memory that cannot be read"),
        (Liar("address", (1 << 63) - 1), "memory that cannot be read"),
        (Liar("address", (1 << 64) - 1), "malformed"),
        (Liar("address", -4096), "malformed"),
        (Liar("size_bytes", 1), "other size"),
        (Liar("size_bytes", 1 << 40), "other size"),
        (Liar("name", "three_bf16"), "repeated"),
        (Liar("name", "bucket"), "unknown"),
        (Liar("checksum", None), "no checksum"),
        (Liar("checksum", "0" * 16), "has checksum"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_offer_that_was_not_agreed_on_is_refused(
    engine: CheckpointEngine, lie: Callable[[], None], what: str
) -> None:
    sender = Peer(
        engine, backend="shm", role="policy", timeout_s=DEADLINE_S, direct=True, habit=lie
    )
    read_samples_into(engine)
    with pytest.raises(PeerRefused, match=what):
        asyncio.run(receive_all(engine))
    sender.process.join(30)
    assert sender.process.exitcode == 1
    sender.close()
    check_a_new_sender_is_read_from(engine)


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


def test_what_the_kernel_does_not_let_read_comes_through_buckets(
    engine: CheckpointEngine, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Peer(
        engine, backend="shm", role="policy", timeout_s=DEADLINE_S, direct=True, habit=hide_memory
    )
    parameters = read_samples_into(engine)
    with unprivileged(), caplog.at_level(logging.WARNING):
        names = asyncio.run(receive_all(engine))
    assert sorted(names) == sorted(sample_weights())
    assert not any(each.any() for each in parameters.values())
    assert "the memory of policy 0 cannot be read (Operation not permitted)" in caplog.text
    assert "its tensors come through buckets" in caplog.text
    sender.wait_until_done()
    sender.close()
