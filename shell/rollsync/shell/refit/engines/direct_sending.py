"""The sending end of what receivers read themselves.

Rules kept here: a tensor is offered only when every receiver reads it itself, and is hashed before
the iterator that made it goes on; it is kept alive until every receiver has taken it; and what is
kept is bounded by the window, unless one tensor alone is larger. Receivers begin to read such a one
while it is hashed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import xxhash

from rollsync.pure.refit.control import (
    DestinationsAnswered,
    DestinationsOffered,
    DestinationsReported,
    OfferedTensor,
    TensorHashed,
    TensorsOffered,
    TensorsTaken,
)
from rollsync.pure.refit.direct import destinations_digest
from rollsync.pure.refit.load_plan import Region
from rollsync.shell.refit.boxes import bytes_of
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import (
    DirectMemory,
    KnownDestinations,
    MemoryPlace,
    ReadableMemory,
    WantedTensor,
)
from rollsync.shell.refit.engines.direct_reads import memory_at, on_host
from rollsync.shell.refit.engines.errors import StreamError
from rollsync.shell.refit.weights import dtype_name

LARGEST_OFFER_BYTES: Final = 16 << 20
"""Of a few tensors: receivers begin to read while the next ones are hashed."""
MOST_OFFERED: Final = 512
"""How many small tensors are offered at once: for the same reason."""
MOST_OFFERS: Final = 16
"""How many offers may be untaken. What waits longer costs time: Python's collector visits it."""


Places = tuple[MemoryPlace, ...]


@dataclass
class _Line:
    """One receiver."""

    channel: ControlChannel
    memory: int
    """Index of the sender's memory as it reads it."""
    destinations: dict[str, WantedTensor]
    taken: int = 0
    """How many offers it has taken."""


class _Item(NamedTuple):
    """A tensor that waits to be offered, or to be taken."""

    name: str
    tensor: torch.Tensor
    checksums: dict[tuple[Region, ...], str]
    address: int
    size_bytes: int


class DirectSender:
    """Offers the tensors of one stream.

    Args:
        memory: this worker's memory.
        window_bytes: how much may be offered and not taken.
        checksum: whether offers carry one.
    """

    def __init__(self, memory: DirectMemory, *, window_bytes: int, checksum: bool) -> None:
        self._ways = memory
        self._known: KnownDestinations = memory.known
        self._window_bytes = window_bytes
        self._offer_bytes = min(LARGEST_OFFER_BYTES, max(window_bytes // 4, 1))
        self._checksum = checksum
        self._lines: list[_Line] = []
        self._memories: list[ReadableMemory] = []
        self._waiting: list[_Item] = []
        self._places: Places = ()
        """Where those that wait are, for each memory."""
        self._waiting_bytes = 0
        # What was offered and not taken by all, oldest first.
        self._offered: deque[list[_Item]] = deque()
        self._offered_bytes = 0
        self._offers = 0
        self._kept: set[int] = set()
        """The first addresses of all tensors that are to be read."""

    async def open(self, channels: Sequence[ControlChannel]) -> None:
        """Agree with every receiver on what it reads."""
        await self._ways.enlarge_pages(min(channel.timeout_s for channel in channels))
        for channel in channels:
            channel.enter("agreed on what is read directly")
            way = self._ways.way(channel)
            if way is None:
                raise channel.refused("a connection that memory cannot be read over")
            if way.own not in self._memories:
                self._memories.append(way.own)
                way.own.begin()
            await channel.send(way.own.admit(channel))
            answer, _ = await channel.receive()
            if not isinstance(answer, DestinationsOffered):
                raise channel.unexpected(answer)
            destinations: dict[str, WantedTensor] = {}
            if answer.digest is None:
                way.own.declined(channel)
            else:
                destinations = await self._destinations(channel, answer.digest, len(channels))
            self._lines.append(_Line(channel, self._memories.index(way.own), destinations))
            channel.set_aside(TensorsTaken)

    async def _destinations(
        self, channel: ControlChannel, digest: str, receivers: int
    ) -> dict[str, WantedTensor]:
        known = self._known.get(digest)
        await channel.send(DestinationsAnswered(known=known is not None))
        if known is not None:
            return known
        reported, _ = await channel.receive()
        if not isinstance(reported, DestinationsReported):
            raise channel.unexpected(reported)
        if destinations_digest(reported.destinations) != digest:
            raise channel.refused("destinations of another digest than it announced")
        return self._known.learn(digest, reported.destinations, receivers)

    def places_of(self, name: str, tensor: torch.Tensor) -> Places | None:
        """Where the receivers read this tensor; None if not all of them do so themselves.

        Raises:
            StreamError: it lies where one lies that is still to be read.
        """
        if self._kept and tensor.data_ptr() in self._kept and tensor.nbytes:
            raise StreamError(
                f"tensor {name!r} lies where another one of the stream lies that is being read",
                remedy="yield weights that stay as they are, or leave the engine's direct off",
            )
        for line in self._lines:
            wanted = line.destinations.get(name)
            if (
                wanted is None
                or wanted.shape != tensor.shape
                or wanted.dtype != dtype_name(tensor.dtype)
            ):
                return None
        places: list[MemoryPlace] = []
        for memory in self._memories:
            place = memory.place_of(tensor)
            if place is None:
                return None
            places.append(place)
        return tuple(places) or None

    @property
    def has_offered_nothing(self) -> bool:
        """Whether no tensor was put yet."""
        return not self._offers and not self._waiting

    async def put(self, name: str, tensor: torch.Tensor, places: Places) -> None:
        """Offer a tensor, which is in these places, soon."""
        size_bytes = tensor.nbytes
        if self._waiting and places != self._places:
            await self._offer()
        self._places = places
        is_late = self._checksum and size_bytes > self._window_bytes
        checksums = self._checksums(name, tensor) if self._checksum and not is_late else {}
        item = _Item(name, tensor.detach(), checksums, tensor.data_ptr(), size_bytes)
        self._waiting.append(item)
        self._waiting_bytes += size_bytes
        self._kept.add(item.address)
        self._ways.note(item.tensor)
        if self._waiting_bytes >= self._offer_bytes or len(self._waiting) == MOST_OFFERED:
            await self._offer()
        if is_late:
            await self._send_checksums(name, self._checksums(name, tensor))

    async def end(self) -> None:
        """Offer the rest, and wait until everything is taken."""
        if self._waiting:
            await self._offer()
        while self._offered:
            await self._await_taken()

    def _checksums(self, name: str, tensor: torch.Tensor) -> dict[tuple[Region, ...], str]:
        """One for each set of regions that a receiver reads, unless it reads nothing."""
        found: dict[tuple[Region, ...], str] = {}
        for line in self._lines:
            regions = line.destinations[name].regions
            if regions and regions not in found:
                found[regions] = _checksum(tensor, regions)
        return found

    async def _send_checksums(self, name: str, checksums: dict[tuple[Region, ...], str]) -> None:
        for line in self._lines:
            checksum = checksums.get(line.destinations[name].regions)
            if checksum is not None:
                await line.channel.send(TensorHashed(offer=self._offers - 1, checksum=checksum))

    async def _offer(self) -> None:
        while self._offered and (
            self._offered_bytes + self._waiting_bytes > self._window_bytes
            or len(self._offered) == MOST_OFFERS
        ):
            await self._await_taken()
        items, self._waiting = self._waiting, []
        for line in self._lines:
            line.channel.enter("offered tensors", items[0].name)
            await line.channel.send(self._offer_for(line, items))
        self._offers += 1
        self._offered.append(items)
        self._offered_bytes += self._waiting_bytes
        self._waiting_bytes = 0

    def _offer_for(self, line: _Line, items: Sequence[_Item]) -> TensorsOffered:
        place = self._places[line.memory]
        return TensorsOffered(
            offer=self._offers,
            agent=self._memories[line.memory].news_for(line.channel),
            memory=place.memory,
            device=place.device,
            tensors=tuple(
                OfferedTensor(
                    name=item.name,
                    address=item.address,
                    size_bytes=item.size_bytes,
                    checksum=item.checksums.get(line.destinations[item.name].regions),
                )
                for item in items
            ),
        )

    async def _await_taken(self) -> None:
        """Wait until every receiver has taken the oldest offer."""
        oldest = self._offers - len(self._offered)
        for line in self._lines:
            line.channel.enter("waited for tensors to be read")
            while line.taken <= oldest:
                body = await line.channel.receive_aside()
                if not isinstance(body, TensorsTaken) or body.offer != line.taken:
                    raise line.channel.unexpected(body)
                line.taken += 1
        items = self._offered.popleft()
        self._offered_bytes -= sum(item.size_bytes for item in items)
        self._kept.difference_update(item.address for item in items)
        items.clear()
        for memory in self._memories:
            memory.settle()


def _checksum(tensor: torch.Tensor, regions: Sequence[Region]) -> str:
    checksum = xxhash.xxh3_64()
    for region in regions:
        if tensor.is_cpu and region.runs == 1:
            checksum.update(memory_at(tensor.data_ptr() + region.offset, region.run_bytes))
        else:
            checksum.update(on_host(bytes_of(tensor, region)))
    return checksum.hexdigest()
