"""What the ends of a stream need where a receiver reads tensors straight into its parameters.

Rules kept here: what is read, and where to, comes from the receiver's own load plan, and nothing
that a sender says changes it; a sender keeps what it has offered as it is until it is taken.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import xxhash

from rollsync.pure.refit.control import Destination, MemoryKind, ProbeOffered, TensorsOffered
from rollsync.pure.refit.direct import destinations_digest, spec_of
from rollsync.pure.refit.load_plan import Copy
from rollsync.shell.refit.engines.base import CheckpointEngine
from rollsync.shell.refit.engines.channel import ControlChannel


class Destinations:
    """The parameters that the tensors of one stream are read into.

    Args:
        wanted: the tensors, in stream order.
        parameters: what the copies write, by name; each contiguous.
        copies: what is read of each tensor, in the order of its regions.
    """

    def __init__(
        self,
        wanted: Sequence[Destination],
        copies: Mapping[str, Sequence[Copy]],
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self.wanted = tuple(wanted)
        self.by_name = {each.name: each for each in wanted}
        self.digest = destinations_digest(self.wanted)
        self.arrived: dict[str, int] = {}
        """The names that were read in this stream, with the bytes of the tensors."""
        self._copies = copies
        self._parameters = parameters

    def copies(self, name: str) -> list[tuple[Copy, torch.Tensor]]:
        """What is read of a tensor, each with the parameter that it is read into."""
        return [(copy, self._parameters[copy.parameter]) for copy in self._copies[name]]

    def note_arrival(self, name: str) -> None:
        """All that is read of a tensor has been read."""
        self.arrived[name] = spec_of(self.by_name[name]).tensor_bytes


class DirectEngine(CheckpointEngine):
    """An engine that may read tensors straight into parameters. A plug-in need not be one."""

    @property
    @abstractmethod
    def reads_directly(self) -> bool:
        """Whether it is set to."""

    @abstractmethod
    def read_into(self, destinations: Destinations | None) -> None:
        """Take the destinations of the next stream; None: everything is handed out in batches."""


@dataclass(frozen=True)
class Read:
    """One copy of an offered tensor to do.

    Attributes:
        address: first byte of the tensor, in the sender's address space.
        copy: what is read of it.
        parameter: where to.
        checksum: takes what has been read, in order; None without checksums.
    """

    address: int
    copy: Copy
    parameter: torch.Tensor
    checksum: xxhash.xxh3_64 | None


class ReadableMemory(Protocol):
    """A sender's own memory, as its receivers read it."""

    memory: MemoryKind
    device: int

    def admit(self, channel: ControlChannel) -> None:
        """Let the receiver at the other end read."""

    def probe(self) -> ProbeOffered:
        """Some bytes to try it with."""

    def can_expose(self, tensor: torch.Tensor) -> bool:
        """Whether receivers can read this tensor where it is."""

    def expose(self, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Make tensors readable; what readers have to be told of that."""

    def withdraw(self) -> None:
        """Let nobody read any more: the stream is over."""

    def release(self) -> None:
        """Give back everything."""


class RemoteMemory(Protocol):
    """The sender's memory, as one of its receivers reads it."""

    def can_write(self, parameter: torch.Tensor) -> bool:
        """Whether this memory can be read into that of a parameter."""

    async def meet(self, channel: ControlChannel, probe: ProbeOffered) -> bool:
        """Whether the sender's memory can be read."""

    async def read(
        self, channel: ControlChannel, offered: TensorsOffered, reads: Sequence[Read]
    ) -> None:
        """Do these reads.

        Raises:
            TransferError: the sender is gone, or has no such memory.
        """

    def release(self) -> None:
        """Give back what is reserved for reading."""


class KnownDestinations:
    """The destinations that receivers have reported, by digest; the newest few."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Destination]] = {}

    def get(self, digest: str) -> dict[str, Destination] | None:
        """By tensor, if they were reported."""
        return self._known.get(digest)

    def learn(self, digest: str, reported: Sequence[Destination], most: int) -> None:
        """Keep them, and forget the oldest of more than `most`."""
        self._known[digest] = {each.name: each for each in reported}
        while len(self._known) > most:
            del self._known[next(iter(self._known))]


@dataclass(frozen=True)
class DirectMemory:
    """Both ends' ways to memory, of which a worker uses one."""

    own: ReadableMemory
    other: RemoteMemory
    known: KnownDestinations = field(default_factory=KnownDestinations)
