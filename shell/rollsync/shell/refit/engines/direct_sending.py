"""The sending end of what receivers read themselves.

Rules kept here: a tensor is offered only when every receiver reads it itself, and is hashed before
the iterator that made it goes on; it is kept alive until every receiver has taken it; and what is
kept is bounded by the window, unless one tensor alone is larger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from rollsync.pure.refit.control import (
    Destination,
    DestinationsAnswered,
    DestinationsOffered,
    DestinationsReported,
    OfferedTensor,
    TensorsOffered,
    TensorsTaken,
)
from rollsync.pure.refit.direct import destinations_digest, spec_of
from rollsync.pure.refit.load_plan import Region
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import KnownDestinations, ReadableMemory
from rollsync.shell.refit.engines.packing import StreamError
from rollsync.shell.refit.load_recorder import bytes_of
from rollsync.shell.refit.weights import dtype_name

LARGEST_OFFER_BYTES = 8 << 20
"""Of a few tensors: receivers begin to read while the next ones are hashed."""


@dataclass
class _Line:
    """One receiver."""

    channel: ControlChannel
    destinations: dict[str, Destination] = field(default_factory=dict)
    taken: int = 0
    """How many offers it has taken."""


@dataclass(frozen=True)
class _Item:
    """A tensor that waits to be offered."""

    name: str
    tensor: torch.Tensor
    checksums: dict[tuple[Region, ...], str]


class DirectSender:
    """Offers the tensors of one stream.

    Args:
        memory: this worker's memory.
        known: what receivers have reported in earlier streams.
        window_bytes: how much may be offered and not taken.
        checksum: whether offers carry one.
    """

    def __init__(
        self,
        memory: ReadableMemory,
        known: KnownDestinations,
        *,
        window_bytes: int,
        checksum: bool,
    ) -> None:
        self._memory = memory
        self._known = known
        self._window_bytes = window_bytes
        self._offer_bytes = min(LARGEST_OFFER_BYTES, max(window_bytes // 4, 1))
        self._checksum = checksum
        self._lines: list[_Line] = []
        self._waiting: list[_Item] = []
        self._waiting_bytes = 0
        # What was offered and not taken by all, oldest first.
        self._offered: deque[list[_Item]] = deque()
        self._offered_bytes = 0
        self._offers = 0
        self._kept: set[int] = set()
        """The first addresses of all tensors that are to be read."""

    async def open(self, channels: Sequence[ControlChannel]) -> None:
        """Agree with every receiver on what it reads."""
        for channel in channels:
            channel.stage, channel.tensor = "agreed on what is read directly", ""
            self._memory.admit(channel)
            await channel.send(self._memory.probe())
            answer, _ = await channel.receive()
            if not isinstance(answer, DestinationsOffered):
                raise channel.unexpected(answer)
            line = _Line(channel)
            if answer.digest is not None:
                line.destinations = await self._destinations(channel, answer.digest, len(channels))
            self._lines.append(line)
            channel.set_aside(TensorsTaken)

    async def _destinations(
        self, channel: ControlChannel, digest: str, receivers: int
    ) -> dict[str, Destination]:
        known = self._known.get(digest)
        await channel.send(DestinationsAnswered(known=known is not None))
        if known is not None:
            return known
        reported, _ = await channel.receive()
        if not isinstance(reported, DestinationsReported):
            raise channel.unexpected(reported)
        if destinations_digest(reported.destinations) != digest:
            raise channel.refused("destinations of another digest than it announced")
        self._known.learn(digest, reported.destinations, receivers)
        return self._known.get(digest) or {}

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether every receiver reads this tensor itself, as it is.

        Raises:
            StreamError: it lies where one lies that is still to be read.
        """
        if tensor.nbytes and tensor.data_ptr() in self._kept:
            raise StreamError(
                f"tensor {name!r} lies where another one of the stream lies that is being read",
                remedy="yield weights that stay as they are, or leave the engine's direct off",
            )
        return (
            bool(self._lines)
            and all(_suits(line.destinations.get(name), tensor) for line in self._lines)
            and self._memory.can_expose(tensor)
        )

    @property
    def has_offered_nothing(self) -> bool:
        """Whether no tensor was put yet."""
        return not self._offers and not self._waiting

    async def put(self, name: str, tensor: torch.Tensor) -> None:
        """Offer a tensor that `takes` said yes to, soon."""
        checksums: dict[tuple[Region, ...], str] = {}
        if self._checksum:
            for line in self._lines:
                regions = line.destinations[name].regions
                if regions and regions not in checksums:
                    checksums[regions] = _checksum(tensor, regions)
        self._waiting.append(_Item(name, tensor.detach(), checksums))
        self._waiting_bytes += tensor.nbytes
        self._kept.add(tensor.data_ptr())
        if self._waiting_bytes >= self._offer_bytes:
            await self._offer()

    async def end(self) -> None:
        """Offer the rest, and wait until everything is taken."""
        if self._waiting:
            await self._offer()
        while self._offered:
            await self._await_taken()

    async def _offer(self) -> None:
        while self._offered and self._offered_bytes + self._waiting_bytes > self._window_bytes:
            await self._await_taken()
        items, self._waiting = self._waiting, []
        agent = self._memory.expose([item.tensor for item in items])
        for line in self._lines:
            line.channel.stage, line.channel.tensor = "offered tensors", items[0].name
            await line.channel.send(self._offer_for(line, items, agent))
        self._offers += 1
        self._offered.append(items)
        self._offered_bytes += self._waiting_bytes
        self._waiting_bytes = 0

    def _offer_for(
        self, line: _Line, items: Sequence[_Item], agent: bytes | None
    ) -> TensorsOffered:
        return TensorsOffered(
            offer=self._offers,
            agent=agent,
            memory=self._memory.memory,
            device=self._memory.device,
            tensors=tuple(
                OfferedTensor(
                    name=item.name,
                    address=item.tensor.data_ptr(),
                    size_bytes=item.tensor.nbytes,
                    checksum=item.checksums.get(line.destinations[item.name].regions),
                )
                for item in items
            ),
        )

    async def _await_taken(self) -> None:
        """Wait until every receiver has taken the oldest offer."""
        oldest = self._offers - len(self._offered)
        for line in self._lines:
            line.channel.stage, line.channel.tensor = "waited for tensors to be read", ""
            while line.taken <= oldest:
                body = await line.channel.receive_aside()
                if not isinstance(body, TensorsTaken) or body.offer != line.taken:
                    raise line.channel.unexpected(body)
                line.taken += 1
        items = self._offered.popleft()
        self._offered_bytes -= sum(item.tensor.nbytes for item in items)
        self._kept.difference_update(item.tensor.data_ptr() for item in items)


def _suits(destination: Destination | None, tensor: torch.Tensor) -> bool:
    if destination is None:
        return False
    spec = spec_of(destination)
    return spec.shape == tuple(tensor.shape) and spec.dtype == dtype_name(tensor.dtype)


def _checksum(tensor: torch.Tensor, regions: Sequence[Region]) -> str:
    checksum = xxhash.xxh3_64()
    for region in regions:
        part: memoryview = bytes_of(tensor, region).contiguous().view(-1).cpu().numpy().data
        checksum.update(part)
    return checksum.hexdigest()
