"""Reading another process's memory over NIXL: from a tensor to a parameter, both registered.

`nixl_storages` has what is registered. What a receiver is told of a sender's agent is what it does
not know yet.

Rules kept here: a receiver is told everything anew once something was given back; and a trainer
whose weights do not last is read from only where they have lasted from one stream to the next.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rollsync.pure.refit.control import ProbeOffered, TensorsOffered
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import DirectWay, MemoryPlace
from rollsync.shell.refit.engines.direct_reads import ReadBatch
from rollsync.shell.refit.engines.nixl_agent import (
    NixlError,
    Read,
    RunsOf,
    UnknownMemory,
    memory_of,
)
from rollsync.shell.refit.engines.nixl_memory import arrival, as_loss
from rollsync.shell.refit.engines.nixl_storages import GiveAgent, RegisteredStorages
from rollsync.shell.refit.engines.rings import is_plain

logger = logging.getLogger(__name__)

_PROBE_BYTES: Final = 16


def nixl_way(agent: GiveAgent, timeout_s: float) -> DirectWay:
    """The way over NIXL.

    Args:
        agent: gives this worker's agent, while something is registered always the same.
        timeout_s: how long one read may take.
    """
    return DirectWay(RegisteredMemory(agent), OtherRegisteredMemory(agent, timeout_s))


class RegisteredMemory:
    """This worker's memory, as receivers read it over NIXL.

    Args:
        agent: gives its agent.
    """

    def __init__(self, agent: GiveAgent) -> None:
        self._agent = agent
        self._storages = RegisteredStorages(agent)
        self._probe = torch.frombuffer(
            bytearray(secrets.token_bytes(_PROBE_BYTES)), dtype=torch.uint8
        )
        self._told: dict[str, int] = {}
        """By receiver, how many of the regions it was told of."""
        self._new: list[int] = []
        """The storages that were registered in this stream."""
        self._must_last = False
        """Whether only storages are registered that were there in an earlier stream."""
        self._lasting: dict[int, StorageWeakRef] = {}
        self._seen: dict[int, StorageWeakRef] = {}

    def begin(self) -> None:
        """Give back what is gone since the last stream."""
        self._new.clear()
        self._lasting = {
            key: storage
            for key, storage in (self._lasting | self._seen).items()
            if not storage.expired()
        }
        self._seen = {}
        if self._storages.forget_gone():
            self._told.clear()

    def admit(self, channel: ControlChannel) -> ProbeOffered:
        """Tell the receiver of everything, unless it was told."""
        self._storages.add([self._probe])
        agent = None if channel.peer in self._told else self._agent().metadata
        self._told[channel.peer] = len(self._storages.regions)
        return ProbeOffered(
            agent=agent, address=self._probe.data_ptr(), contents=bytes(self._probe.tolist())
        )

    def declined(self, channel: ControlChannel) -> None:
        """Tell it everything next time."""
        self._told.pop(channel.peer, None)

    def place_of(self, tensor: torch.Tensor) -> MemoryPlace | None:
        """Where the tensor is registered, which it is now if it is new."""
        if not (tensor.is_cpu or tensor.is_cuda) or not is_plain(tensor):
            return None
        place = self._storages.find(tensor)
        if place is None and self._may_last(tensor):
            try:
                self._storages.add([tensor])
            except NixlError as error:
                logger.warning("weights come through buckets: %s", error)
                return None
            self._new.append(tensor.untyped_storage()._cdata)
            place = MemoryPlace(*memory_of(tensor))
        return place

    def news_for(self, channel: ControlChannel) -> bytes | None:
        """What was registered since the receiver was told of something."""
        regions = self._storages.regions
        known = self._told[channel.peer]
        if known == len(regions):
            return None
        self._told[channel.peer] = len(regions)
        return self._agent().metadata_of(regions[known:])

    def settle(self) -> None:
        """Give back at once what was registered for this stream only, and do so no more."""
        if self._new and self._storages.give_back_gone(self._new):
            self._must_last = True

    def withdraw(self, *, failed: bool) -> None:
        """Nobody reads uninvited; whether a receiver kept what it was told is not known after a
        failure."""
        if failed:
            self._told.clear()

    def release(self) -> None:
        """Give back everything."""
        self._storages.release()
        self._told.clear()
        self._new.clear()

    def _may_last(self, tensor: torch.Tensor) -> bool:
        """Whether it is worth while to register a tensor's storage."""
        if not self._must_last:
            return True
        storage = tensor.untyped_storage()
        if storage._cdata in self._lasting:
            return True
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = StorageWeakRef(storage)
        return False


class OtherRegisteredMemory:
    """The memory of a sender, as this worker reads it over NIXL.

    Args:
        agent: gives this worker's agent, while something is registered always the same.
        timeout_s: how long one read may take.
    """

    slice_bytes = 4 << 20
    unhashed_slice_bytes = 32 << 20
    most_runs = 1024

    def __init__(self, agent: GiveAgent, timeout_s: float) -> None:
        self._agent = agent
        self._timeout_s = timeout_s
        self._storages = RegisteredStorages(agent)
        self._probed = torch.empty(_PROBE_BYTES, dtype=torch.uint8)
        self._place = MemoryPlace("DRAM", 0)
        """Where the parameters are."""
        self._peer = ""

    async def meet(
        self, channel: ControlChannel, probe: ProbeOffered, parameters: Sequence[torch.Tensor]
    ) -> bool:
        """Whether the sender's probe can be read, and the parameters can be registered."""
        self._storages.forget_gone()
        try:
            places = {memory_of(parameter) for parameter in parameters}
            if len(places) != 1:
                raise NixlError("the parameters are in the memory of several devices")
            self._place = MemoryPlace(*places.pop())
            self._storages.add(parameters)
            self._storages.add([self._probed])
            self._acquaint(probe.agent)
            return await self._read_probe(channel, probe)
        except NixlError as error:
            logger.warning(
                "%s: the memory of %s cannot be read (%s): its tensors come through buckets",
                channel.worker,
                channel.peer,
                error,
            )
            # The buckets of this stream are read over the same agent.
            self._part()
            return False

    def look_at(self, channel: ControlChannel, offered: TensorsOffered) -> None:
        """Learn of what the sender has registered for the offer."""
        if offered.agent is not None:
            try:
                self._agent().learn_more(self._peer, offered.agent)
            except NixlError as error:
                self._lose()
                raise channel.refused(
                    f"an offer of memory that cannot be read ({error})"
                ) from error

    def start(self, channel: ControlChannel, offered: TensorsOffered, batch: ReadBatch) -> UnderWay:
        """Begin to read.

        Raises:
            PeerFailed: the sender gave up.
            PeerLost: it is gone, or NIXL cannot reach it.
            PeerRefused: it has no such memory.
        """
        source = RunsOf(offered.memory, offered.device, batch.remote)
        target = RunsOf(self._place.memory, self._place.device, batch.local)
        try:
            read = self._agent().read_runs(self._peer, source, target)
        except UnknownMemory as error:
            channel.take_in()
            raise channel.refused(f"an offer of memory that cannot be read ({error})") from error
        except NixlError:
            self._lose()
            with as_loss(channel):
                raise
        return UnderWay(channel, read, self._timeout_s, self._lose)

    def release(self) -> None:
        """Forget the sender, and give the parameters back."""
        self._part()
        self._storages.release()

    def _acquaint(self, metadata: bytes | None) -> None:
        """Learn of the sender's agent, if it says anything of it."""
        agent = self._agent()
        if metadata is not None:
            name = agent.meet(metadata)
            if name == self._peer:
                agent.forget(name)
                agent.learn_anew(name, metadata)
            else:
                self._part()
                self._peer = name
        if not agent.knows(self._peer):
            raise NixlError("its agent is not known")

    async def _read_probe(self, channel: ControlChannel, probe: ProbeOffered) -> bool:
        if len(probe.contents) != _PROBE_BYTES:
            return False
        self._probed.zero_()
        source = probe.address, 0, memory_of(self._probed)[0]
        read = self._agent().read(self._peer, source, self._probed)
        try:
            await arrival(channel, read, self._timeout_s)
        finally:
            read.release()
        return bytes(self._probed.tolist()) == probe.contents

    def _part(self) -> None:
        """Forget the sender, which is not read from any more."""
        if self._peer:
            self._agent().forget(self._peer)
            self._peer = ""

    def _lose(self) -> None:
        """Forget the sender, which cannot be read from any more."""
        if self._peer:
            self._agent().lose(self._peer)
            self._peer = ""


class UnderWay:
    """A batch that NIXL reads.

    Args:
        lose: called when it fails.
    """

    def __init__(
        self, channel: ControlChannel, read: Read, timeout_s: float, lose: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._read = read
        self._timeout_s = timeout_s
        self._lose = lose

    def is_done(self) -> bool:
        """Whether all of it has arrived.

        Raises:
            PeerLost: it will not.
        """
        with as_loss(self._channel), self._losing():
            return self._read.is_done()

    async def finish(self) -> None:
        """Wait for it.

        Raises:
            PeerFailed: the sender gave up.
            PeerLost: it is gone, or NIXL cannot reach it.
            TransferTimeout: it takes too long.
        """
        with as_loss(self._channel), self._losing():
            await arrival(self._channel, self._read, self._timeout_s)

    def end(self) -> None:
        """Let nothing arrive any more."""
        self._read.release()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except NixlError:
            self._lose()
            raise
