"""What a stream needs from the memory that it goes through, whichever kind that is.

Rule kept here: streams (`sending`, `receiving`) know when a part of a bucket may be filled, read
and handed on; how its bytes get from one process to the other is the medium's business alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollsync.pure.refit.control import Hello
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.rings import Assembly, Buffers


class SenderMemory(Protocol):
    """The buffers that a sender packs into."""

    memory_id: str
    """Names these buffers among all that there ever are."""
    buffers: Buffers

    async def hand_over(self, channel: ControlChannel) -> None:
        """Enable the other end to read the buffers, once per receiver."""

    async def serve(self) -> None:
        """Do what receivers need for reading the buffers; runs beside a stream, until cancelled."""

    def progress(self) -> None:
        """The same, once: what there is to do between two looks for a receiver's answer."""

    def release(self) -> None:
        """Give the memory back."""


class ReceiverMemory(Protocol):
    """A sender's buffers, as a receiver reads them."""

    buffers: Buffers
    """Where a receiver finds what it has read: the sender's own buffers, or buffers like them."""

    def start(
        self, channel: ControlChannel, first_byte: int, size: int, target: torch.Tensor | None
    ) -> bool:
        """Begin to read what the sender has filled, if that is work at all.

        Args:
            channel: to the sender.
            first_byte: where in the buffers, the sender's as well as these, it begins.
            size: how many bytes.
            target: where it is to come, a part of the medium's assembly; None: to where these
                buffers have it.

        Returns:
            Whether that goes on beside this worker; if not, all is there.
        """

    async def fetch(self, channel: ControlChannel, first_byte: int) -> None:
        """Wait until what was started there has come."""


class ReceiverMedium(Protocol):
    """Where a receiver gets a sender's buffers from."""

    assembly: Assembly
    """For tensors that the buffers cannot hold."""

    @property
    def own(self) -> SenderMemory | None:
        """The buffers of this worker's own that it reads into, from which others can read in turn;
        None where it reads the sender's as they are."""

    def knows(self, memory_id: str) -> bool:
        """Whether these buffers were handed over in an earlier stream."""

    async def take_over(self, channel: ControlChannel, hello: Hello) -> ReceiverMemory:
        """The buffers that the sender names, handed over now if they are not known."""

    def release(self) -> None:
        """Give back what is reserved for reading."""
