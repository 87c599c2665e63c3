"""The `auto` engine: each route over shared memory where both ends are on one host, else over NIXL.

A policy worker with receivers of both kinds packs each bucket once: into shared memory that is
registered with NIXL as well, which the ones map and the others read from afar. A rollout worker
that relays to both kinds reads into such memory.

Rules kept here: `rollsync.pure.refit.choose_engine` decides, for both ends from the same metadata;
and NIXL is started only by a worker with a route that needs it, unless that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from rollsync.pure.refit import (
    EngineChoice,
    PolicyWorker,
    Route,
    RoutingTable,
    choose_engine,
)
from rollsync.pure.refit.patience import DEFAULT_REFIT_TIMEOUT_S
from rollsync.pure.refit.routes import Worker
from rollsync.shell.refit.engines.addresses import Listener, listen_at
from rollsync.shell.refit.engines.base import RoutingEngine
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.direct import DirectMemory
from rollsync.shell.refit.engines.media import ReceiverMedium, SenderMemory
from rollsync.shell.refit.engines.memory import SharedBuffers, SharedMedium, check_shared_memory
from rollsync.shell.refit.engines.metadata import index_of
from rollsync.shell.refit.engines.nixl import NixlEnd
from rollsync.shell.refit.engines.nixl_agent import NixlAgent
from rollsync.shell.refit.engines.nixl_memory import RegisteredBuffers
from rollsync.shell.refit.engines.process_memory import process_memory
from rollsync.shell.refit.engines.staged import (
    BUFFERS,
    StagedEngine,
)


class AutoCheckpointEngine(StagedEngine, RoutingEngine):
    """Moves weights over `shm` inside a host and over `nixl` between hosts.

    Args:
        bucket_size: bytes of one buffer, a multiple of 256.
        device: the torch device that has the buffers of a worker whose routes are all over NIXL; a
            sender with a route over shared memory has its buffers on the host.
        backend_name: NIXL's transport.
        backend_init_params: the transport's options; values become strings.
        bind_address: the address of this host at which a receiver listens; by default that by
            which other hosts reach it.
        refit_timeout_s: how long one wait for the other end may take.
        checksum: check every bucket with XXH3.
        direct: read tensors straight from the policy's memory into the parameters, over either way;
            see the `shm` engine.
        large_pages: with `direct`, make pages large; see the `shm` engine.
        preinit: start NIXL's agent now and not when it turns out that a route needs it, as that
            takes about a second.
        relay: let rollout workers hand weights on wherever a link between hosts would carry them
            more often than once for each policy worker. Not with `direct`.
        shard_expert_weights: NeMo-RL's option. False sends whole tensors to every rollout worker
            and not only what it keeps, of experts or else; what is read directly is the same.
        release_after_refit: read by the synchronizer, which then finalizes after each sync.
    """

    backend: ClassVar[str] = "auto"

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
        check_shared_memory(self.backend)
        del release_after_refit
        self._nixl = NixlEnd(device, backend_name, backend_init_params)
        super().__init__(
            bucket_size,
            refit_timeout_s=refit_timeout_s,
            checksum=checksum,
            direct=self._both_ways(refit_timeout_s, large_pages) if direct else None,
            relay=relay,
            in_parts=shard_expert_weights,
        )
        self._bind_address = bind_address
        self._on_host: Listener | None = None
        self._choices: tuple[EngineChoice, ...] = ()
        self._all_choices: tuple[EngineChoice, ...] = ()
        if preinit:
            self._nixl.agent()

    def _both_ways(self, timeout_s: float, large_pages: bool) -> DirectMemory:
        return DirectMemory(
            on_host=process_memory(),
            over_network=self._nixl.direct(timeout_s),
            large_pages=large_pages,
        )

    @property
    def choices(self) -> tuple[EngineChoice, ...]:
        """What carries each of this worker's routes, and a policy worker's on to where relays take
        them; none before its process group is set up."""
        return self._all_choices

    def prepare(self) -> dict[str, object]:
        """Listen for the sender, wherever it is."""
        if self._on_host is None:
            self._on_host = Listener.on_this_host()
        metadata = super().prepare()
        metadata["on_host"] = {
            "address": self._on_host.address,
            "secret": self._on_host.secret.hex(),
        }
        return metadata

    def finalize(self) -> None:
        """Stop listening, give back all buffers, end NIXL's agent."""
        super().finalize()
        if self._on_host is not None:
            self._on_host.close()
            self._on_host = None
        self._nixl.stop()
        self._choices = self._all_choices = ()

    def _listen(self) -> Listener:
        return listen_at(self._bind_address)

    def _check_peer(self, index: int, metadata: Mapping[str, object]) -> None:
        """One of the two ways reaches every host."""

    def _take_routes(
        self, me: Worker, table: RoutingTable, workers: Sequence[Mapping[str, object]]
    ) -> None:
        def host_of(worker: Worker) -> str:
            return str(workers[index_of(worker, table.train_world_size)]["host"])

        def chosen(routes: Iterable[Route]) -> tuple[EngineChoice, ...]:
            return tuple(
                choose_engine(each, host_of(each.sender), host_of(each.receiver)) for each in routes
            )

        before = self._carriers
        self._choices = chosen(each for each in table.routes if me in (each.sender, each.receiver))
        starts_here = isinstance(me, PolicyWorker)
        self._all_choices = chosen(table.routes_of(me.rank)) if starts_here else self._choices
        if self._carriers != before:
            self._release_memory()

    @property
    def _carriers(self) -> set[str]:
        return {choice.engine for choice in self._choices}

    def _is_on_host(self, rollout_rank: int) -> bool:
        # Without routes there is nobody to come in.
        return any(
            each.engine == "shm" and each.route.receiver.rank == rollout_rank
            for each in self._choices
        )

    def _entrance(self, *, on_host: bool) -> Listener | None:
        return self._on_host if on_host else self._listener

    def _endpoint(self, metadata: Mapping[str, object], rank: int) -> Mapping[str, object]:
        on_host = metadata["on_host"]
        is_local = self._is_on_host(rank)
        return on_host if is_local and isinstance(on_host, Mapping) else metadata

    def _reserve(self) -> SenderMemory:
        if "shm" not in self._carriers:
            return self._nixl.memory(self._bucket_bytes)
        if "nixl" not in self._carriers:
            return SharedBuffers.allocate(BUFFERS, self._bucket_bytes)
        return self._shared_and_registered()

    def _reader(self) -> ReceiverMedium:
        if self._carriers == {"shm"}:
            return SharedMedium()
        if "shm" not in self._carriers:
            return self._nixl.medium(self._bucket_bytes, self._timeout_s)
        return self._nixl.medium_of(self._shared_and_registered(), self._timeout_s)

    def _shared_and_registered(self) -> SharedRegisteredBuffers:
        # The agent comes first, so that nothing is reserved for one that does not start.
        agent = self._nixl.agent()
        shared = SharedBuffers.allocate(BUFFERS, self._bucket_bytes)
        return SharedRegisteredBuffers(shared, agent)


class SharedRegisteredBuffers:
    """Shared buffers that are registered with an agent too.

    Args:
        shared: the buffers; this object gives them back.
        agent: where to register them.
    """

    def __init__(self, shared: SharedBuffers, agent: NixlAgent) -> None:
        self._shared = shared
        try:
            self._registered = RegisteredBuffers(agent, shared.buffers)
        except BaseException:
            shared.release()
            raise
        self.buffers = shared.buffers
        self.memory_id = shared.memory_id

    async def hand_over(self, channel: ControlChannel) -> None:
        """Send the file to a receiver on this host; tell another one where the buffers are."""
        await (self._shared if channel.on_host else self._registered).hand_over(channel)

    async def serve(self) -> None:
        """Answer the readers from afar whenever this end waits."""
        await self._registered.serve()

    def progress(self) -> None:
        """Answer the readers from afar, and let another process have this core."""
        self._registered.progress()

    def release(self) -> None:
        """Deregister, then free."""
        self._registered.release()
        self._shared.release()
        self.buffers = self._shared.buffers
