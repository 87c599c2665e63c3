"""The `nixl` engine: weights over NIXL, between hosts or within one.

NIXL moves over UCX what UCX finds a way for: RDMA, shared memory, TCP; from and to the host's
memory or a device's. The PyPI package runs on a machine without a device too. A receiver reads a
bucket from the sender's registered buffer into its own, and loads from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from rollsync.pure.refit import EngineChoice, PolicyWorker, RoutingTable
from rollsync.pure.refit.patience import DEFAULT_REFIT_TIMEOUT_S
from rollsync.pure.refit.routes import Worker
from rollsync.shell.refit.engines.addresses import Listener, listen_at
from rollsync.shell.refit.engines.base import RoutingEngine
from rollsync.shell.refit.engines.direct import DirectMemory, DirectWay
from rollsync.shell.refit.engines.media import ReceiverMedium, SenderMemory
from rollsync.shell.refit.engines.nixl_agent import NixlAgent
from rollsync.shell.refit.engines.nixl_direct import nixl_way
from rollsync.shell.refit.engines.nixl_memory import (
    NixlMedium,
    RegisteredBuffers,
    reserve_transfer_buffers,
)
from rollsync.shell.refit.engines.staged import BUFFERS, StagedEngine
from rollsync.shell.refit.errors import RefitConfigurationError


class NixlEnd:
    """A worker's agent, started when it is first needed, and its buffers.

    Args:
        device: the torch device that has the buffers.
        backend_name: NIXL's transport.
        backend_init_params: the transport's options; values become strings.
    """

    def __init__(
        self, device: str, backend_name: str, backend_init_params: Mapping[str, object] | None
    ) -> None:
        try:
            self._device = torch.device(device)
        except RuntimeError as error:
            raise RefitConfigurationError(
                f"device is {device!r}, which torch does not know: {error}",
                remedy="give `cpu`, `cuda` or `cuda:1`, or another of torch's devices",
            ) from error
        if not isinstance(backend_init_params or {}, Mapping):
            raise RefitConfigurationError(
                f"backend_init_params is {backend_init_params!r}, and no mapping",
                remedy="give the transport's options by their names",
            )
        self._backend_name = backend_name
        self._backend_params = {
            name: str(value) for name, value in (backend_init_params or {}).items()
        }
        self._agent: NixlAgent | None = None

    def agent(self) -> NixlAgent:
        """The agent. Its start takes about a second."""
        if self._agent is None:
            self._agent = NixlAgent(self._backend_name, self._backend_params)
        return self._agent

    def memory(self, buffer_bytes: int) -> RegisteredBuffers:
        """New buffers for a sender."""
        return self._buffers(buffer_bytes, own=True)

    def medium(self, buffer_bytes: int, timeout_s: float) -> NixlMedium:
        """New buffers for a receiver, and what reads into them."""
        return self.medium_of(self._buffers(buffer_bytes, own=False), timeout_s)

    def medium_of(self, own: SenderMemory, timeout_s: float) -> NixlMedium:
        """What reads into a receiver's buffers, which are registered with the agent."""
        return NixlMedium(self.agent(), own, timeout_s)

    def _buffers(self, buffer_bytes: int, *, own: bool) -> RegisteredBuffers:
        buffers = reserve_transfer_buffers(BUFFERS, buffer_bytes, self._device, own=own)
        return RegisteredBuffers(self.agent(), buffers)

    def direct(self, timeout_s: float) -> DirectWay:
        """The way past the buffers."""
        return nixl_way(self.agent, timeout_s)

    def stop(self) -> None:
        """End the agent; all buffers have been given back."""
        if self._agent is not None:
            self._agent.stop()
            self._agent = None


class NixlCheckpointEngine(StagedEngine, RoutingEngine):
    """Moves weights over NIXL.

    Args:
        bucket_size: bytes of one buffer, a multiple of 256.
        device: the torch device that has the buffers.
        backend_name: NIXL's transport.
        backend_init_params: the transport's options; values become strings.
        bind_address: the address of this host at which a receiver listens; by default that by
            which other hosts reach it.
        preinit: start the agent now and not in `prepare`, as that takes about a second.
        refit_timeout_s: how long one wait for the other end may take.
        checksum: check every bucket with XXH3. A bucket in a device's memory is copied to the host
            for that.
        direct: read tensors straight from the policy's memory into the parameters; see the `shm`
            engine.
        large_pages: with `direct`, make pages large; see the `shm` engine.
        relay: let rollout workers hand weights on wherever a link between hosts would carry them
            more often than once for each policy worker. Not with `direct`.
        shard_expert_weights: NeMo-RL's option. False sends whole tensors to every rollout worker
            and not only what it keeps, of experts or else; what is read directly is the same.
        release_after_refit: read by the synchronizer, which then finalizes after each sync.
    """

    backend: ClassVar[str] = "nixl"

    def __init__(
        self,
        bucket_size: int,
        *,
        device: str = "cpu",
        backend_name: str = "UCX",
        backend_init_params: Mapping[str, object] | None = None,
        bind_address: str | None = None,
        preinit: bool = False,
        refit_timeout_s: float = DEFAULT_REFIT_TIMEOUT_S,
        checksum: bool = True,
        direct: bool = False,
        large_pages: bool = True,
        relay: bool = False,
        shard_expert_weights: bool = True,
        release_after_refit: bool = False,
    ) -> None:
        del release_after_refit
        self._end = NixlEnd(device, backend_name, backend_init_params)
        super().__init__(
            bucket_size,
            refit_timeout_s=refit_timeout_s,
            checksum=checksum,
            direct=self._over_network(refit_timeout_s, large_pages) if direct else None,
            relay=relay,
            in_parts=shard_expert_weights,
        )
        self._bind_address = bind_address
        self._choices: tuple[EngineChoice, ...] = ()
        if preinit:
            self._end.agent()

    def _over_network(self, timeout_s: float, large_pages: bool) -> DirectMemory:
        return DirectMemory(over_network=self._end.direct(timeout_s), large_pages=large_pages)

    @property
    def choices(self) -> tuple[EngineChoice, ...]:
        """The routes that a policy worker's weights take, if relays are among them."""
        return self._choices

    def prepare(self) -> dict[str, object]:
        """Start the agent and listen for the sender."""
        self._end.agent()
        return super().prepare()

    def finalize(self) -> None:
        """Stop listening, give back all buffers, end the agent."""
        super().finalize()
        self._end.stop()
        self._choices = ()

    def _listen(self) -> Listener:
        return listen_at(self._bind_address)

    def _check_peer(self, index: int, metadata: Mapping[str, object]) -> None:
        """NIXL reaches every host."""

    def _take_routes(
        self, me: Worker, table: RoutingTable, workers: Sequence[Mapping[str, object]]
    ) -> None:
        starts_here = table.has_relays and isinstance(me, PolicyWorker)
        self._choices = tuple(
            EngineChoice(route=route, engine="nixl", reason="every route is carried by it")
            for route in (table.routes_of(me.rank) if starts_here else ())
        )

    def _is_on_host(self, rollout_rank: int) -> bool:
        return False

    def _reserve(self) -> SenderMemory:
        return self._end.memory(self._bucket_bytes)

    def _reader(self) -> ReceiverMedium:
        return self._end.medium(self._bucket_bytes, self._timeout_s)
