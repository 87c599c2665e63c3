"""The receiving end of what is read straight into parameters.

Rules kept here: a tensor is read only where the receiver's own plan says so, once a stream, and of
the size that was agreed on; and an offer is answered when all of it was read and its checksums
compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import xxhash

from rollsync.pure.refit.control import (
    DestinationsAnswered,
    DestinationsOffered,
    DestinationsReported,
    OfferedTensor,
    ProbeOffered,
    TensorHashed,
    TensorsOffered,
    TensorsTaken,
)
from rollsync.pure.refit.direct import check_offered
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import Destinations, DirectMemory, RemoteMemory
from rollsync.shell.refit.engines.direct_reads import Read, ReadBatch, UnfinishedRead, batches
from rollsync.shell.refit.engines.errors import PeerRefused

STAGE: Final = "read tensors directly"
READS_AHEAD: Final = 2
"""How many batches are being read at a time, where they do not come at once."""


class _Found(NamedTuple):
    """The checksum of what was read of a tensor, and that of what was sent."""

    tensor: str
    found: xxhash.xxh3_64
    sent: str | None
    """None: it follows."""


@dataclass
class DirectReader:
    """Reads the offers of one stream.

    Attributes:
        memory: how the sender's memory is read.
        destinations: where to; None: nothing is read directly.
        checksum: whether an offer has to carry checksums.
    """

    memory: DirectMemory
    destinations: Destinations | None
    checksum: bool
    _offers: int = field(default=0, init=False)
    _remote: RemoteMemory | None = field(default=None, init=False)
    """The sender's memory, if it was agreed that it is read."""
    _late: _Found | None = field(default=None, init=False)
    """Of the newest offer: what is compared when the sender's checksum has come."""

    async def open(self, channel: ControlChannel) -> None:
        """Try to read the sender's memory, and say what will be read of it."""
        channel.enter("agreed on what is read directly")
        wanted, way = self.destinations, self.memory.way(channel)
        if wanted is not None:
            for parameter in wanted.parameters.values():
                self.memory.note(parameter)
            await self.memory.enlarge_pages(channel.timeout_s)
        probe, _ = await channel.receive()
        if not isinstance(probe, ProbeOffered):
            raise channel.unexpected(probe)
        remote = None
        if wanted is not None and way is not None:
            wanted.arrived.clear()
            if await way.other.meet(channel, probe, tuple(wanted.parameters.values())):
                remote = way.other
        if wanted is None or remote is None:
            await channel.send(DestinationsOffered(digest=None))
            return
        await channel.send(DestinationsOffered(digest=wanted.digest))
        self._remote = remote
        answer, _ = await channel.receive()
        if not isinstance(answer, DestinationsAnswered):
            raise channel.unexpected(answer)
        if not answer.known:
            await channel.send(DestinationsReported(destinations=wanted.wanted))

    async def take(self, channel: ControlChannel, news: TensorsOffered | TensorHashed) -> None:
        """Read an offer, or compare what was read of a last tensor.

        Raises:
            TransferError: it is none that was agreed on, or the sender cannot be read from.
        """
        late = self._late
        if isinstance(news, TensorHashed):
            if late is None or news.offer != self._offers:
                raise channel.unexpected(news)
            self._late = None
            await self._finish(channel, [late._replace(sent=news.checksum)])
            return
        if late is not None:
            raise channel.refused(f"an offer of {late.tensor!r}: no checksum")
        await self._take(channel, news)

    def check_end(self, channel: ControlChannel) -> None:
        """Called when the stream has ended.

        Raises:
            PeerRefused: the sender has left out a checksum.
        """
        if self._late is not None:
            raise channel.refused(f"an offer of {self._late.tensor!r}: no checksum")

    async def _take(self, channel: ControlChannel, offered: TensorsOffered) -> None:
        destinations, remote = self.destinations, self._remote
        if destinations is None or remote is None or offered.offer != self._offers:
            raise channel.unexpected(offered)
        channel.enter(STAGE)
        remote.look_at(channel, offered)
        reads: list[Read] = []
        found: list[_Found] = []
        for tensor in offered.tensors:
            channel.enter(STAGE, tensor.name)
            checksum = self._check(channel, destinations, tensor, offered.tensors[-1])
            if checksum is not None:
                found.append(_Found(tensor.name, checksum, tensor.checksum))
            reads += [
                Read(tensor.address, strip, checksum, destinations.on_device(strip.parameter))
                for strip in destinations.strips(tensor.name)
            ]
            destinations.note_arrival(tensor.name)
        await _read(channel, remote, offered, reads, hashed=self.checksum)
        # If the sender is gone, what was read may be another process's memory.
        channel.take_in()
        if found and found[-1].sent is None:
            self._late = found.pop()
        await self._finish(channel, found)

    def _check(
        self,
        channel: ControlChannel,
        destinations: Destinations,
        tensor: OfferedTensor,
        last: OfferedTensor,
    ) -> xxhash.xxh3_64 | None:
        """What hashes an offered tensor as it is read, if anything has to."""
        mistake = check_offered(
            destinations.expected,
            destinations.arrived.keys(),
            tensor,
            checksums=self.checksum and tensor is not last,
        )
        if mistake is not None:
            raise channel.refused(f"an offer of {mistake.tensor!r}: {mistake.reason}")
        is_hashed = self.checksum and destinations.expected[tensor.name].is_read
        return xxhash.xxh3_64() if is_hashed else None

    async def _finish(self, channel: ControlChannel, found: Sequence[_Found]) -> None:
        """Compare checksums, and say that the offer is taken if that was all of it."""
        for each in found:
            _compare(channel, each)
        if self._late is None:
            await channel.send(TensorsTaken(offer=self._offers))
            self._offers += 1


async def _read(
    channel: ControlChannel,
    remote: RemoteMemory,
    offered: TensorsOffered,
    reads: Sequence[Read],
    *,
    hashed: bool,
) -> None:
    """Read everything, and hash each batch while it is in the processor's cache."""
    slice_bytes = remote.slice_bytes if hashed else remote.unhashed_slice_bytes
    begun: deque[tuple[ReadBatch, UnfinishedRead]] = deque()
    try:
        for batch in batches(reads, slice_bytes, remote.most_runs):
            unfinished = remote.start(channel, offered, batch)
            if unfinished is None:
                batch.hash()
                continue
            begun.append((batch, unfinished))
            while begun and (len(begun) == READS_AHEAD or begun[0][1].is_done()):
                await _finish_first(begun)
        while begun:
            await _finish_first(begun)
    finally:
        for _, unfinished in begun:
            unfinished.end()


async def _finish_first(begun: deque[tuple[ReadBatch, UnfinishedRead]]) -> None:
    batch, unfinished = begun[0]
    await unfinished.finish()
    begun.popleft()
    unfinished.end()
    batch.hash()


def _compare(channel: ControlChannel, each: _Found) -> None:
    found = each.found.hexdigest()
    if found != each.sent:
        raise PeerRefused(
            f"tensor {each.tensor!r} of {channel.peer} has checksum {found} where it was"
            f" read, sent as {each.sent}",
            worker=channel.worker,
            stage=channel.stage,
            tensor=each.tensor,
            remedy="yield weights that stay as they are until the stream ends; if they do,"
            " check the host's memory",
        )
