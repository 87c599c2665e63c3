"""The receiving end of what is read straight into parameters.

Rules kept here: a tensor is read only where the receiver's own plan says so, once a stream, and of
the size that was agreed on; and an offer is answered when all of it was read and its checksums
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from rollsync.pure.refit.control import (
    DestinationsAnswered,
    DestinationsOffered,
    DestinationsReported,
    ProbeOffered,
    TensorsOffered,
    TensorsTaken,
)
from rollsync.pure.refit.direct import check_offered
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import Destinations, Read, RemoteMemory
from rollsync.shell.refit.engines.errors import PeerRefused


@dataclass
class DirectReader:
    """Reads the offers of one stream.

    Attributes:
        remote: how the sender's memory is read.
        destinations: where to; None: nothing is read directly.
        checksum: whether an offer has to carry checksums.
    """

    remote: RemoteMemory
    destinations: Destinations | None
    checksum: bool
    _offers: int = field(default=0, init=False)
    _agreed: bool = field(default=False, init=False)

    async def open(self, channel: ControlChannel) -> None:
        """Try to read the sender's memory, and say what will be read of it."""
        channel.stage, channel.tensor = "agreed on what is read directly", ""
        probe, _ = await channel.receive()
        if not isinstance(probe, ProbeOffered):
            raise channel.unexpected(probe)
        wanted = self.destinations
        if wanted is not None:
            wanted.arrived.clear()
            if not await self.remote.meet(channel, probe):
                wanted = None
        await channel.send(DestinationsOffered(digest=None if wanted is None else wanted.digest))
        if wanted is None:
            return
        self._agreed = True
        answer, _ = await channel.receive()
        if not isinstance(answer, DestinationsAnswered):
            raise channel.unexpected(answer)
        if not answer.known:
            await channel.send(DestinationsReported(destinations=wanted.wanted))

    async def take(self, channel: ControlChannel, offered: TensorsOffered) -> None:
        """Read an offer.

        Raises:
            TransferError: it is none that was agreed on, or the sender cannot be read from.
        """
        destinations = self.destinations
        if destinations is None or not self._agreed or offered.offer != self._offers:
            raise channel.unexpected(offered)
        channel.stage = "read tensors directly"
        reads: list[Read] = []
        checksums: list[tuple[str, str, xxhash.xxh3_64]] = []
        for tensor in offered.tensors:
            channel.tensor = tensor.name
            mistake = check_offered(
                destinations.by_name,
                destinations.arrived.keys(),
                tensor,
                checksums=self.checksum,
            )
            if mistake is not None:
                raise channel.refused(f"an offer of {mistake.tensor!r}: {mistake.reason}")
            destinations.note_arrival(tensor.name)
            checksum = None
            if tensor.checksum is not None:
                checksum = xxhash.xxh3_64()
                checksums.append((tensor.name, tensor.checksum, checksum))
            reads += [
                Read(tensor.address, copy, parameter, checksum)
                for copy, parameter in destinations.copies(tensor.name)
            ]
        await self.remote.read(channel, offered, reads)
        _compare(channel, checksums)
        self._offers += 1
        await channel.send(TensorsTaken(offer=offered.offer))


def _compare(channel: ControlChannel, checksums: Sequence[tuple[str, str, xxhash.xxh3_64]]) -> None:
    for name, sent, found in checksums:
        if found.hexdigest() != sent:
            raise PeerRefused(
                f"tensor {name!r} of {channel.peer} has checksum {found.hexdigest()} where it was"
                f" read, sent as {sent}",
                rank=channel.rank,
                stage=channel.stage,
                tensor=name,
                remedy="yield weights that stay as they are until the stream ends; if they do,"
                " check the host's memory",
            )
