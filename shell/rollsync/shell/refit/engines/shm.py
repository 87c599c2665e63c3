"""The `shm` engine: weights between processes of one host, through shared memory.

A policy worker owns two buffers that its rollout workers map, and they load from where the weights
lie: the only copies are the packing and the loading.

Rule kept here: neither the socket nor the memory has a name in a file system, so that a killed job
leaves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollsync.pure.refit.patience import DEFAULT_REFIT_TIMEOUT_S
from rollsync.shell.refit.engines.addresses import Listener
from rollsync.shell.refit.engines.direct import DirectMemory
from rollsync.shell.refit.engines.media import ReceiverMedium, SenderMemory
from rollsync.shell.refit.engines.memory import SharedBuffers, SharedMedium, check_shared_memory
from rollsync.shell.refit.engines.metadata import host_identity
from rollsync.shell.refit.engines.process_memory import process_memory
from rollsync.shell.refit.engines.staged import (
    BUFFERS,
    StagedEngine,
)
from rollsync.shell.refit.errors import RefitConfigurationError


class ShmCheckpointEngine(StagedEngine):
    """Moves weights between processes of one host.

    Args:
        bucket_size: bytes of one buffer, a multiple of 256.
        refit_timeout_s: how long one wait for the other end may take.
        checksum: check every bucket with XXH3.
        direct: read tensors straight from the policy's memory into the parameters, where a first
            stream has shown that the engine's loader only copies them there. The policy's iterator
            then has to leave what it has yielded as it is.
        large_pages: with `direct`, make the pages of weights and parameters large that are still
            there in a later stream: it takes seconds for a GiB, once, and reads are then faster.
        release_after_refit: read by the synchronizer, which then finalizes after each sync.
    """

    backend: ClassVar[str] = "shm"

    def __init__(
        self,
        bucket_size: int,
        *,
        refit_timeout_s: float = DEFAULT_REFIT_TIMEOUT_S,
        checksum: bool = True,
        direct: bool = False,
        large_pages: bool = True,
        release_after_refit: bool = False,
    ) -> None:
        check_shared_memory(self.backend)
        del release_after_refit
        super().__init__(
            bucket_size,
            refit_timeout_s=refit_timeout_s,
            checksum=checksum,
            direct=_on_host(large_pages=large_pages) if direct else None,
        )

    def _listen(self) -> Listener:
        return Listener.on_this_host()

    def _check_peer(self, index: int, metadata: Mapping[str, object]) -> None:
        if metadata.get("host") != host_identity():
            raise RefitConfigurationError(
                f"worker {index} of the metadata is on another host ({metadata.get('host')})",
                remedy="use the nixl engine between hosts",
            )

    def _is_on_host(self, rollout_rank: int) -> bool:
        return True

    def _reserve(self) -> SenderMemory:
        return SharedBuffers.allocate(BUFFERS, self._bucket_bytes)

    def _reader(self) -> ReceiverMedium:
        return SharedMedium()


def _on_host(*, large_pages: bool) -> DirectMemory:
    return DirectMemory(on_host=process_memory(), large_pages=large_pages)
