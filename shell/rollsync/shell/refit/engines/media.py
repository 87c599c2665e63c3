"""What a stream needs from the memory that it goes through, whichever kind that is.

Rule kept here: streams (`sending`, `receiving`) know when a bucket may be filled, read and handed
on; how its bytes get from one process to the other is the medium's business alone.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from rollsync.pure.refit.control import Hello
from rollsync.shell.refit.engines.channel import ControlChannel


class SenderMemory(Protocol):
    """The buffers that a sender packs into."""

    memory_id: str
    """Names these buffers among all that there ever are."""
    buffer_bytes: int

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Each `(buffer_bytes,)` uint8."""

    async def hand_over(self, channel: ControlChannel) -> None:
        """Enable the other end to read the buffers, once per receiver."""

    async def serve(self) -> None:
        """Do what receivers need for reading the buffers; runs beside a stream, until cancelled."""

    def release(self) -> None:
        """Give the memory back."""


class ReceiverMemory(Protocol):
    """A sender's buffers, as a receiver reads them."""

    buffer_bytes: int
    """Size of one of the sender's buffers."""
    in_place: ClassVar[bool]
    """Whether what `fetch` gives lies in the sender's own buffer, which it may then not refill."""

    def start(
        self, channel: ControlChannel, bucket: int, first_byte: int, filled_bytes: int
    ) -> None:
        """Begin to read a bucket that the sender has filled, if that is work at all.

        Args:
            channel: to the sender.
            bucket: index in the stream.
            first_byte: where in the sender's buffer it begins.
            filled_bytes: how much of it is filled.
        """

    async def fetch(
        self, channel: ControlChannel, bucket: int, first_byte: int, filled_bytes: int
    ) -> torch.Tensor:
        """The contents of the bucket that was started: `(at least filled_bytes,)` uint8, of a
        length that every element size divides."""


class ReceiverMedium(Protocol):
    """Where a receiver gets a sender's buffers from."""

    def knows(self, memory_id: str) -> bool:
        """Whether these buffers were handed over in an earlier stream."""

    async def take_over(self, channel: ControlChannel, hello: Hello) -> ReceiverMemory:
        """The buffers that the sender names, handed over now if they are not known."""

    def release(self) -> None:
        """Give back what is reserved for reading."""
