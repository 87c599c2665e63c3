"""The moments of a stream at which one of its two processes can be made to die.

A stream is what its two ends say to each other, so most moments are `sends`, `sent` or `received`
and a kind of message; the rest are what an end does in between.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Final

from rollsync.pure.refit.control import ControlBody
from rollsync.shell.refit.engines import connections
from rollsync.shell.refit.engines.addresses import Listener
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.memory import SharedBuffers, SharedMedium
from rollsync.shell.refit.engines.nixl_direct import OtherRegisteredMemory
from rollsync.shell.refit.engines.nixl_memory import NixlMedium, RegisteredBuffers
from rollsync.shell.refit.engines.process_memory import OtherMemory
from rollsync.shell.refit.engines.staged import StagedEngine

NEVER: Final = ""
BEFORE_IT: Final = "before the stream"
FINALIZES: Final = "finalizes"

BEFORE_ADMISSION: Final = ("waited for the sender",)
GREETED: Final = ("connected",)
AGREEING: Final = ("connected", "compared the declarations")
ADMITTED: Final = (*AGREEING, "waited for a bucket", "read a bucket", "loaded")
"""Stages in which a receiver notices: which one of the last is a race that anybody may win."""

SENDER: Final = {
    BEFORE_IT: BEFORE_ADMISSION,
    "connects": BEFORE_ADMISSION,
    "sends Hello": BEFORE_ADMISSION,
    "sent Hello": GREETED,
    "hands over": GREETED,
    "sent PlanOffered": AGREEING,
    "sends StreamBegins": AGREEING,
    "makes three_bf16": ADMITTED,
    "sends BucketFilled": ADMITTED,
    "sent BucketFilled": ADMITTED,
    "makes three_buckets": ADMITTED,
    "sends BucketFilled 4": ADMITTED,
    "received BucketReleased": ADMITTED,
    "makes the end": ADMITTED,
    "sends StreamEnded": ADMITTED,
}
"""Where a sender dies, and the stages in which its receiver may notice."""

RECEIVER: Final = (
    BEFORE_IT,
    "accepts",
    "sends Challenge",
    "sent Challenge",
    "received Hello",
    "sends Welcome",
    "sent Welcome",
    "takes over",
    "sends PlanAnswered",
    "sent PlanAnswered",
    "received BucketFilled",
    "fetches",
    "loads three_bf16",
    "loads three_buckets",
    "sends BucketReleased",
    "sent BucketReleased 3",
    "received StreamEnded",
    "sends StreamAccepted",
)
"""Where a receiver dies before its sender may take the stream for received."""

DIRECT_SENDER: Final = (
    "sends ProbeOffered",
    "sends DestinationsAnswered",
    "sent DestinationsAnswered",
    "sends TensorsOffered",
    "sent TensorsOffered",
    "sent TensorsOffered 2",
    "sends TensorHashed",
    "sent TensorHashed",
    "received TensorsTaken",
)
"""Where a sender dies that is read from directly."""

DIRECT_RECEIVER: Final = (
    "received ProbeOffered",
    "sends DestinationsOffered",
    "sent DestinationsOffered",
    "sends DestinationsReported",
    "sent DestinationsReported",
    "reads directly",
    "reads directly 2",
    "sends TensorsTaken",
    "sent TensorsTaken",
)
"""Where a receiver dies that reads directly."""

QUICK: Final = frozenset(
    {BEFORE_IT, "hands over", "sent BucketFilled", "takes over", "fetches", "loads three_buckets"}
)
"""The moments of the default tests where each takes a second; the others are slow tests."""


DIRECT_QUICK: Final = frozenset(
    {"sends ProbeOffered", "sent TensorsOffered 2", "sends TensorHashed", "reads directly 2"}
)
"""The same of those in which something is read directly."""


class Death:
    """Ends this process, as the kernel does for memory, at one moment.

    Args:
        at: the moment's name; with a number, that many times into it.
    """

    def __init__(self, at: str) -> None:
        name, _, number = at.rpartition(" ")
        self._name, self._left = (name, int(number)) if number.isdigit() else (at, 1)

    def moment(self, name: str) -> None:
        """Says that a moment has come."""
        self._left -= name == self._name
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arrange(death: Death) -> None:
    """Let this process, which runs one end of a stream, tell `death` of every moment."""
    _arrange_messages(death)
    for owner, name, moment in (
        (connections, "connect", "connects"),
        (Listener, "accept", "accepts"),
        (SharedBuffers, "hand_over", "hands over"),
        (RegisteredBuffers, "hand_over", "hands over"),
        (SharedMedium, "take_over", "takes over"),
        (NixlMedium, "take_over", "takes over"),
        (SharedBuffers, "fetch", "fetches"),
        (NixlMedium, "fetch", "fetches"),
        (OtherMemory, "start", "reads directly"),
        (OtherRegisteredMemory, "start", "reads directly"),
        (StagedEngine, "finalize", FINALIZES),
    ):
        setattr(owner, name, _telling(getattr(owner, name), death, moment))


def _telling(original: Callable[..., Any], death: Death, moment: str) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        death.moment(moment)
        return original(*args, **kwargs)

    return told


def _arrange_messages(death: Death) -> None:
    send, receive = ControlChannel.send, ControlChannel.receive
    receive_aside = ControlChannel.receive_aside

    async def telling_send(channel: ControlChannel, body: ControlBody) -> bytes:
        death.moment(f"sends {type(body).__name__}")
        message = await send(channel, body)
        death.moment(f"sent {type(body).__name__}")
        return message

    async def telling_receive(channel: ControlChannel) -> tuple[ControlBody, bytes]:
        body, message = await receive(channel)
        death.moment(f"received {type(body).__name__}")
        return body, message

    async def telling_aside(channel: ControlChannel) -> ControlBody:
        body = await receive_aside(channel)
        death.moment(f"received {type(body).__name__}")
        return body

    for name, telling in (
        ("send", telling_send),
        ("receive", telling_receive),
        ("receive_aside", telling_aside),
    ):
        setattr(ControlChannel, name, telling)
