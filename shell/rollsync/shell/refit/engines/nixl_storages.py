"""The storages of tensors that are registered with a worker's NIXL agent, for direct reads.

A storage is registered as a whole when it is first needed, and given back when nothing uses it any
more or the engine is finalized.

Rule kept here: a storage is known by what it is and not by its address, which another one may have
later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rollsync.shell.refit.engines.direct import MemoryPlace
from rollsync.shell.refit.engines.nixl_agent import MemoryRegion, NixlAgent, memory_of

GiveAgent = Callable[[], NixlAgent]


@dataclass(frozen=True)
class _Entry:
    """A storage that is registered."""

    storage: StorageWeakRef
    region: MemoryRegion


class RegisteredStorages:
    """The storages of some tensors, registered with a worker's agent.

    Args:
        agent: gives the agent.
    """

    def __init__(self, agent: GiveAgent) -> None:
        self._agent = agent
        self._entries: dict[int, _Entry] = {}
        self.regions: list[MemoryRegion] = []
        """Those of all storages in the order in which they were registered; see `forget_gone`."""
        self._has_gone = False

    def find(self, tensor: torch.Tensor) -> MemoryPlace | None:
        """Where the tensor is, if its storage is registered as it is now."""
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None:
            return None
        region = entry.region
        if (region.address, region.size_bytes) != (storage.data_ptr(), storage.nbytes()):
            self._give_back([storage._cdata])
            return None
        return MemoryPlace(region.kind, region.device)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register the storages of tensors that are in memory of one kind, unless they are.

        Raises:
            NixlError: they cannot be; none is.
        """
        new: dict[int, _Entry] = {}
        for tensor in tensors:
            if self.find(tensor) is None:
                storage = tensor.untyped_storage()
                kind, device = memory_of(tensor)
                region = MemoryRegion(kind, device, storage.data_ptr(), storage.nbytes())
                new[storage._cdata] = _Entry(StorageWeakRef(storage), region)
        if new:
            regions = [entry.region for entry in new.values()]
            self._agent().register_regions(regions)
            self._entries |= new
            self.regions += regions

    def give_back_gone(self, keys: Sequence[int]) -> bool:
        """Give those of these storages back that nothing uses any more; whether there were any."""
        gone = [
            key for key in keys if key in self._entries and self._entries[key].storage.expired()
        ]
        self._give_back(gone)
        return bool(gone)

    def forget_gone(self) -> bool:
        """Give back what nothing uses any more; whether anything was since the last time."""
        self.give_back_gone(list(self._entries))
        found, self._has_gone = self._has_gone, False
        if found:
            self.regions = [entry.region for entry in self._entries.values()]
        return found

    def release(self) -> None:
        """Give back everything."""
        self._give_back(list(self._entries))
        self.regions = []
        self._has_gone = False

    def _give_back(self, keys: Sequence[int]) -> None:
        if keys:
            self._has_gone = True
            self._agent().deregister_regions([self._entries.pop(key).region for key in keys])
