"""Frames between two ends without a connection: whole, in order, and of this stream alone."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.errors import PeerRefused
from rollsync.shell.refit.engines.frames import (
    GREETING_LIMIT_BYTES,
    MESSAGE_LIMIT_BYTES,
    BrokenFrame,
    Frames,
    Side,
    proof,
)

SECRET, NONCE, OTHER_NONCE = b"s" * 32, b"1" * 16, b"2" * 16
SIDES: tuple[Side, ...] = ("sender", "receiver")


def an_end(side: Side, *, secret: bytes = SECRET, nonce: bytes = NONCE) -> Frames:
    """One that has been authenticated."""
    frames = Frames(side)
    frames.authenticate(secret, nonce, OTHER_NONCE)
    return frames


def opened(frames: Frames) -> list[bytes]:
    """All messages that have come."""
    messages = []
    while (message := frames.open_next()) is not None:
        messages.append(message)
    return messages


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 90))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    messages: list[bytes], piece: int
) -> None:
    sender, receiver = an_end("sender"), an_end("receiver")
    stream = b"".join(sender.seal(each) for each in messages)
    arrived: list[bytes] = []
    for start in range(0, len(stream), piece):
        receiver.take(stream[start : start + piece])
        arrived += opened(receiver)
    assert arrived == messages
    receiver.take(sender.seal(b"the next"))
    assert opened(receiver) == [b"the next"]


def test_a_frame_that_is_changed_anywhere_is_not_opened() -> None:
    frame = an_end("sender").seal(b"message")
    for place, bit in itertools.product(range(len(frame)), range(8)):
        changed = bytearray(frame)
        changed[place] ^= 1 << bit
        receiver = an_end("receiver")
        # One that says now that it is longer may get what it wants.
        receiver.take(bytes(changed) + bytes(1 << 10))
        length = int.from_bytes(changed[:4])
        if len(b"message") + (1 << 10) < length <= MESSAGE_LIMIT_BYTES:
            assert receiver.open_next() is None
        else:
            with pytest.raises(BrokenFrame):
                receiver.open_next()


@pytest.mark.parametrize(
    "sender",
    [
        an_end("sender", secret=b"t" * 32),
        an_end("sender", nonce=b"3" * 16),
        an_end("receiver"),
        Frames("sender"),
    ],
    ids=["of another run", "of another stream", "its own", "of a stranger"],
)
def test_a_frame_of_anybody_else_is_not_opened(sender: Frames) -> None:
    receiver = an_end("receiver")
    receiver.take(sender.seal(b"message"))
    with pytest.raises(BrokenFrame, match="wrong code"):
        receiver.open_next()


def test_a_frame_is_opened_once_and_in_its_turn() -> None:
    sender = an_end("sender")
    first, second = sender.seal(b"1"), sender.seal(b"2")
    again, early = an_end("receiver"), an_end("receiver")
    again.take(first + first)
    assert again.open_next() == b"1"
    early.take(second)
    for receiver in (again, early):
        with pytest.raises(BrokenFrame, match="wrong code"):
            receiver.open_next()


@pytest.mark.parametrize(
    ("receiver", "limit"),
    [(Frames("receiver"), GREETING_LIMIT_BYTES), (an_end("receiver"), MESSAGE_LIMIT_BYTES)],
    ids=["stranger", "authenticated"],
)
def test_the_length_is_refused_before_anything_has_come(receiver: Frames, limit: int) -> None:
    receiver.take((limit + 1).to_bytes(4) + bytes(16))
    with pytest.raises(BrokenFrame, match=f"{limit + 1} bytes is too long"):
        receiver.open_next()


def test_who_has_proved_itself_goes_on_with_what_has_come() -> None:
    sender, receiver = Frames("sender"), Frames("receiver")
    greeting = sender.seal(b"hello")
    sender.authenticate(SECRET, NONCE)
    receiver.take(greeting + sender.seal(b"first"))
    assert receiver.open_next() == b"hello"
    proved = Frames("receiver")
    proved.authenticate(SECRET, NONCE)
    proved.continue_from(receiver)
    assert (proved.is_authenticated, receiver.is_authenticated) == (True, False)
    assert opened(proved) == [b"first"]


def test_a_proof_is_of_one_side_and_its_nonces() -> None:
    proofs = {
        proof(secret, side, *nonces)
        for secret in (b"a", b"b")
        for side in SIDES
        for nonces in ((NONCE, OTHER_NONCE), (OTHER_NONCE, NONCE))
    }
    assert len(proofs) == 8


def test_a_message_without_bytes_is_none_and_is_refused() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.sendall(Frames("sender").seal(b""))
        channel = ControlChannel(
            here, side="receiver", worker="me", peer="it", timeout_s=5.0, on_host=True
        )
        with pytest.raises(PeerRefused, match="it sent"):
            asyncio.run(channel.receive())
