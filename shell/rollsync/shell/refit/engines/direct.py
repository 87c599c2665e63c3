"""What the ends of a stream need where a receiver reads tensors straight into its parameters.

How one process's memory is read by another is a `DirectWay`: over the kernel inside a host
(`process_memory`), over NIXL between hosts (`nixl_direct`). All else is the same for both.

Rules kept here: what is read, and where to, comes from the receiver's own load plan, and nothing
that a sender says changes it; a sender keeps what it has offered as it is until it is taken.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch

from rollsync.pure.refit.control import Destination, MemoryKind, ProbeOffered, TensorsOffered
from rollsync.pure.refit.direct import destinations_digest, expected_of
from rollsync.pure.refit.load_plan import Copy, Region
from rollsync.shell.refit.boxes import bytes_of
from rollsync.shell.refit.engines.base import CheckpointEngine
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct_reads import ReadBatch, Strip, UnfinishedRead
from rollsync.shell.refit.engines.large_pages import LargePages
from rollsync.shell.refit.errors import RefitConfigurationError

_SHARE_OF_WAIT: Final = 0.1
"""Of the other end's patience: what making pages large may take before a stream."""


def check_relayed(*, direct: bool, relay: bool) -> None:
    """Refuse a configuration in which weights would both be read directly and be relayed.

    Raises:
        RefitConfigurationError: both are asked for.
    """
    if direct and relay:
        raise RefitConfigurationError(
            "direct and relay are both set: what is read straight into an engine's parameters"
            " comes through no buffers that it could be handed on from",
            remedy="leave out one of them: direct where the policy shares its engines' host or has"
            " a fast link to each, relay where one link to other hosts is what a sync waits for",
        )


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
        self.expected = expected_of(wanted)
        self.digest = destinations_digest(self.wanted)
        self.arrived: dict[str, int] = {}
        """The names that were read in this stream, with the bytes that were read of each."""
        self._copies = copies
        self._strips: dict[str, tuple[Strip, ...]] = {}
        self._take(parameters)

    def _take(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self._on_device = {
            name: bytes_of(each, Region(0, each.nbytes))[0]
            for name, each in parameters.items()
            if not each.is_cpu
        }

    def into(self, parameters: Mapping[str, torch.Tensor]) -> Destinations:
        """The same of another stream; only this object, not that one, may outlive the parameters.

        Args:
            parameters: the same memory as before, if there were any.
        """
        again = copy.copy(self)
        again.arrived = {}
        again._take(parameters)
        return again

    def on_device(self, parameter: str) -> torch.Tensor | None:
        """The bytes of a parameter that is not in the host's memory."""
        return self._on_device.get(parameter)

    def strips(self, name: str) -> tuple[Strip, ...]:
        """What is read of a tensor that is wanted; made once, as it costs as much as reading."""
        found = self._strips.get(name)
        if found is None:
            found = self._strips[name] = tuple(
                _strip(each, self.parameters[each.parameter]) for each in self._copies[name]
            )
        return found

    def note_arrival(self, name: str) -> None:
        """All that is read of a tensor has been read."""
        self.arrived[name] = self.expected[name].read_bytes


def _strip(read: Copy, parameter: torch.Tensor) -> Strip:
    run = min(read.source.run_bytes, read.target.run_bytes)
    return Strip(
        source=read.source.offset,
        parameter=read.parameter,
        target=read.target.offset,
        address=parameter.data_ptr() + read.target.offset,
        run_bytes=run,
        runs=read.source.total_bytes // run if run else 0,
        source_stride=_stride(read.source, run),
        target_stride=_stride(read.target, run),
    )


def _stride(region: Region, run: int) -> int:
    return run if region.runs == 1 else region.stride_bytes


class DirectEngine(CheckpointEngine):
    """An engine that may read tensors straight into parameters. A plug-in need not be one."""

    @property
    @abstractmethod
    def reads_directly(self) -> bool:
        """Whether it is set to."""

    @abstractmethod
    def read_into(self, destinations: Destinations | None) -> None:
        """Take the destinations of the next stream; None: everything is handed out in batches."""


class MemoryPlace(NamedTuple):
    """What memory a tensor is in, in a receiver's words."""

    memory: MemoryKind
    device: int


HOST = MemoryPlace("DRAM", 0)


class ReadableMemory(Protocol):
    """A sender's own memory, as its receivers read it."""

    def begin(self) -> None:
        """A stream begins."""

    def admit(self, channel: ControlChannel) -> ProbeOffered:
        """Let the receiver at the other end read; some bytes for it to try that with."""

    def declined(self, channel: ControlChannel) -> None:
        """The receiver reads nothing in this stream, and may not have kept what it was told."""

    def place_of(self, tensor: torch.Tensor) -> MemoryPlace | None:
        """Where receivers read this tensor, which is now made readable; None: they cannot."""

    def news_for(self, channel: ControlChannel) -> bytes | None:
        """What the receiver has to be told before it can read what was made readable."""

    def settle(self) -> None:
        """Something was taken, and may be gone by now."""

    def withdraw(self, *, failed: bool) -> None:
        """Let nobody read any more: the stream is over."""

    def release(self) -> None:
        """Give back everything."""


class RemoteMemory(Protocol):
    """The sender's memory, as one of its receivers reads it."""

    slice_bytes: int
    """Best read at once where it is hashed afterwards, while it is in the processor's cache."""
    unhashed_slice_bytes: int
    """The same where it is not."""
    most_runs: int
    """How many runs can be read at once."""

    async def meet(
        self, channel: ControlChannel, probe: ProbeOffered, parameters: Sequence[torch.Tensor]
    ) -> bool:
        """Whether the sender's memory can be read, and into these."""

    def look_at(self, channel: ControlChannel, offered: TensorsOffered) -> None:
        """Take note of an offer, of which something is read next.

        Raises:
            PeerRefused: there is no such memory.
        """

    def start(
        self, channel: ControlChannel, offered: TensorsOffered, batch: ReadBatch
    ) -> UnfinishedRead | None:
        """Begin to read; None when it is done already.

        Raises:
            TransferError: the sender is gone, or has no such memory.
        """

    def release(self) -> None:
        """Give back what is reserved for reading."""


class WantedTensor(NamedTuple):
    """A destination as a sender compares its tensors with it."""

    shape: torch.Size
    dtype: str
    regions: tuple[Region, ...]


class KnownDestinations:
    """The destinations that receivers have reported, by digest; the newest few."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, WantedTensor]] = {}

    def get(self, digest: str) -> dict[str, WantedTensor] | None:
        """By tensor, if they were reported."""
        return self._known.get(digest)

    def learn(
        self, digest: str, reported: Sequence[Destination], most: int
    ) -> dict[str, WantedTensor]:
        """Keep them, and forget the oldest of more than `most`."""
        learned = self._known[digest] = {
            each.name: WantedTensor(torch.Size(each.shape), each.dtype, each.regions)
            for each in reported
        }
        while len(self._known) > most:
            del self._known[next(iter(self._known))]
        return learned


@dataclass(frozen=True)
class DirectWay:
    """Both ends of a way to another process's memory, of which a worker uses one."""

    own: ReadableMemory
    other: RemoteMemory


class DirectMemory:
    """The ways that an engine has.

    Args:
        on_host: over routes through the host's memory.
        over_network: over all others.
        large_pages: make the pages of weights and parameters large that last from stream to stream.
    """

    def __init__(
        self,
        *,
        on_host: DirectWay | None = None,
        over_network: DirectWay | None = None,
        large_pages: bool,
    ) -> None:
        self._on_host = on_host
        self._over_network = over_network
        self.known = KnownDestinations()
        self._large_pages = LargePages() if large_pages else None

    def way(self, channel: ControlChannel) -> DirectWay | None:
        """That to the process at the other end."""
        return self._on_host if channel.on_host else self._over_network

    def note(self, tensor: torch.Tensor) -> None:
        """Remember a tensor, a weight or a parameter, that may be there in the next stream too."""
        if self._large_pages is not None:
            self._large_pages.note(tensor)

    async def enlarge_pages(self, timeout_s: float) -> None:
        """Make the pages large of what was noted and is still there, before anybody reads.

        Args:
            timeout_s: how long the other end waits at most.
        """
        if self._large_pages is not None and self._large_pages.are_due():
            for way in self._ways():
                # Pages that are pinned, as registering may do, cannot be moved.
                way.own.release()
            await self._large_pages.enlarge(timeout_s * _SHARE_OF_WAIT)

    def withdraw(self, *, failed: bool) -> None:
        """Let nobody read any more: the stream is over."""
        for way in self._ways():
            way.own.withdraw(failed=failed)

    def release(self) -> None:
        """Give back everything."""
        for way in self._ways():
            way.other.release()
            way.own.release()

    def _ways(self) -> list[DirectWay]:
        return [way for way in (self._on_host, self._over_network) if way is not None]
