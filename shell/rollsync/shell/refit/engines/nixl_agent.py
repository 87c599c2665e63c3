"""NIXL as this package uses it: one agent per worker, its registered buffers, and reads.

Rules kept here: NIXL's Python package is loaded only here and only when asked for; what it raises
leaves as an error of this package; registered memory is deregistered before it is freed, also when
only some of it could be registered; and an agent ends when it is stopped, whoever still knows it.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from rollsync.shell.refit.errors import RefitConfigurationError, RefitError

if TYPE_CHECKING:
    from nixl_cu12._api import (
        Descriptors,
        Registered,
        TransferHandle,
        nixl_agent,
        nixl_agent_config,
    )

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Where the package's API may be: the PyPI packages differ by CUDA version."""

MemoryKind = Literal["DRAM", "VRAM"]


@dataclass(frozen=True)
class MemoryRegion:
    """Memory that is registered, or may be.

    Attributes:
        device: its index; 0 for the host.
    """

    kind: MemoryKind
    device: int
    address: int
    size_bytes: int


@dataclass(frozen=True)
class RunsOf:
    """Runs of bytes in memory of one kind.

    Attributes:
        runs: address and bytes of each, in turn.
    """

    kind: MemoryKind
    device: int
    runs: Sequence[int]


class NixlError(RefitError):
    """NIXL could not do what it was asked for."""


class RegistrationError(RefitError):
    """A transfer buffer could not be registered with NIXL; none stays registered."""


class UnknownMemory(NixlError):
    """Nobody has registered the memory that was to be read, or it is not known here."""


class NixlAgent:
    """One worker's agent.

    Args:
        backend_name: NIXL's transport, `UCX`.
        backend_params: the transport's own options.
    """

    def __init__(self, backend_name: str, backend_params: Mapping[str, str]) -> None:
        api = _api()
        self._backend_name = backend_name
        self._met: Counter[str] = Counter()
        """How many here know each other agent."""
        # NIXL's own progress thread polls without a pause, so it would take a whole core from
        # packing or loading; `progress` is called instead where this process waits.
        configuration = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            self._agent: nixl_agent = api.nixl_agent(
                f"rollsync-{secrets.token_hex(8)}", configuration
            )
            self._agent.create_backend(backend_name, dict(backend_params))
        except Exception as error:
            raise RefitConfigurationError(
                f"NIXL cannot start its backend {backend_name!r}: {error}",
                remedy="correct engine_kwargs.nixl.backend_name or backend_init_params",
            ) from error

    def stop(self) -> None:
        """End it, with its connections. What it had registered has been given back."""
        # NIXL ends an agent with the last reference to it. An error that was kept may have one to
        # the object around it, and to this one.
        vars(self._agent).pop("agent", None)

    def progress(self) -> None:
        """Answer what other agents have asked of this one."""
        self._agent.get_new_notifs()

    @property
    def metadata(self) -> bytes:
        """What another agent needs to read this one's registered memory."""
        return self._agent.get_agent_metadata()

    def register(self, buffers: Sequence[torch.Tensor]) -> list[Registered]:
        """Register all buffers, or none.

        Raises:
            RegistrationError: one of them cannot be.
        """
        done: list[Registered] = []
        for index, buffer in enumerate(buffers):
            kind, device = memory_of(buffer)
            try:
                done.append(
                    self._agent.register_memory(
                        [(buffer.data_ptr(), buffer.nbytes, device, "")],
                        mem_type=kind,
                        backends=[self._backend_name],
                    )
                )
            except Exception as error:
                self.deregister(done)
                raise RegistrationError(
                    f"transfer buffer {index + 1} of {len(buffers)} ({buffer.nbytes} bytes) cannot"
                    f" be registered with NIXL: {error}",
                    remedy="lower update_weights_bucket_memory_ratio, or raise the locked-memory"
                    " limit (ulimit -l)",
                ) from error
        return done

    def register_regions(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory that is not a transfer buffer: all of one kind, or none.

        Raises:
            NixlError: it cannot be.
        """
        try:
            self._agent.register_memory(
                _rows(regions), mem_type=regions[0].kind, backends=[self._backend_name]
            )
        except Exception as error:
            total = sum(region.size_bytes for region in regions)
            raise NixlError(f"{total} bytes cannot be registered with NIXL: {error}") from error

    def deregister_regions(self, regions: Sequence[MemoryRegion]) -> None:
        """Undo `register_regions`, for all of these at once: one by one it would take a time that
        grows with the square of their number."""
        by_kind: dict[MemoryKind, list[MemoryRegion]] = {}
        for region in regions:
            by_kind.setdefault(region.kind, []).append(region)
        for kind, same in by_kind.items():
            self._agent.deregister_memory(self._agent.get_reg_descs(_rows(same), mem_type=kind))

    def deregister(self, registered: Sequence[Registered]) -> None:
        """Undo `register`."""
        for each in registered:
            self._agent.deregister_memory(each)

    def metadata_of(self, regions: Sequence[MemoryRegion]) -> bytes:
        """What another agent that knows this one needs to read these registered regions."""
        if len({each.kind for each in regions}) != 1:
            return self.metadata
        descriptors = self._agent.get_reg_descs(_rows(regions), mem_type=regions[0].kind)
        return self._agent.get_partial_agent_metadata(descriptors, False, [self._backend_name])

    def meet(self, metadata: bytes) -> str:
        """Learn of another agent, or of more that it has registered; its name."""
        name = self._add(metadata)
        self._met[name] += 1
        return name

    def learn_more(self, peer: str, metadata: bytes) -> None:
        """Learn of more that an agent which was met has registered."""
        if self._add(metadata) != peer:
            raise NixlError(f"what came as metadata of {peer} is another agent's")

    def learn_anew(self, peer: str, metadata: bytes) -> None:
        """Learn what an agent which was met has registered now, and forget what it had."""
        self._remove(peer)
        self.learn_more(peer, metadata)

    def forget(self, peer: str) -> None:
        """Forget another agent, which may be dead, unless somebody else here has met it."""
        if self._met[peer] > 1:
            self._met[peer] -= 1
        else:
            self.lose(peer)

    def lose(self, peer: str) -> None:
        """Forget another agent, whoever has met it: nothing can be read from it any more."""
        if self._met.pop(peer, 0):
            # One that was killed cannot be parted from properly.
            with contextlib.suppress(NixlError):
                self._remove(peer)

    def knows(self, peer: str) -> bool:
        """Whether it was met and neither forgotten nor lost."""
        return self._met[peer] > 0

    def _add(self, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(f"NIXL does not take the sender's metadata: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def _remove(self, peer: str) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as error:
            raise NixlError(f"NIXL cannot forget {peer}: {error}") from error

    def read(self, peer: str, source: tuple[int, int, MemoryKind], target: torch.Tensor) -> Read:
        """Begin to read into `target`.

        Args:
            source: address, device index and kind of the peer's memory.
            target: a part of a registered buffer, as many bytes as are read.
        """
        address, device, kind = source
        target_kind, target_device = memory_of(target)
        return self.read_runs(
            peer,
            RunsOf(kind, device, [address, target.nbytes]),
            RunsOf(target_kind, target_device, [target.data_ptr(), target.nbytes]),
        )

    def read_runs(self, peer: str, source: RunsOf, target: RunsOf) -> Read:
        """Begin to read many runs of bytes at once.

        Args:
            source: of the peer's memory.
            target: of registered memory, as many runs, each as long as that of the source.

        Raises:
            UnknownMemory: no registered memory has them.
        """
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._descriptors(target),
                self._descriptors(source),
                peer,
                b"",
                [self._backend_name],
            )
        except Exception as error:
            raise UnknownMemory(f"NIXL cannot read that of {peer}: {error}") from error
        try:
            state = self._agent.transfer(handle)
        except Exception as error:
            self._agent.release_xfer_handle(handle)
            raise NixlError(f"NIXL cannot read from {peer}: {error}") from error
        return Read(self._agent, handle, state)

    def _descriptors(self, runs: RunsOf) -> Descriptors:
        if len(runs.runs) == 2:
            # One at a time is the way of buckets, and numpy's is longer.
            address, size = runs.runs
            return self._agent.get_xfer_descs([(address, size, runs.device)], mem_type=runs.kind)
        pairs = np.array(runs.runs, dtype=np.uint64).reshape(-1, 2)
        rows = np.full((len(pairs), 3), runs.device, dtype=np.uint64)
        rows[:, :2] = pairs
        return self._agent.get_xfer_descs(rows, mem_type=runs.kind)


class Read:
    """A read that was begun."""

    def __init__(self, agent: nixl_agent, handle: TransferHandle, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_done(self) -> bool:
        """Whether all bytes have arrived.

        Raises:
            NixlError: they will not.
        """
        try:
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            raise NixlError(f"the read failed: {error}") from error
        if self._state == "ERR":
            raise NixlError("the read failed")
        return self._state == "DONE"

    def release(self) -> None:
        """End the read, also one that is under way."""
        self._agent.release_xfer_handle(self._handle)
        # It would keep the agent.
        del self._handle


def _rows(regions: Sequence[MemoryRegion]) -> list[tuple[int, int, int, str]]:
    return [(each.address, each.size_bytes, each.device, "") for each in regions]


def memory_of(buffer: torch.Tensor) -> tuple[MemoryKind, int]:
    """What NIXL calls the memory that a tensor is in, and the index of its device."""
    if buffer.is_cuda:
        return "VRAM", buffer.get_device()
    return "DRAM", 0


class _Api(Protocol):
    """The part of NIXL's API module that is used here."""

    @property
    def nixl_agent(self) -> type[nixl_agent]: ...
    @property
    def nixl_agent_config(self) -> type[nixl_agent_config]: ...


def _api() -> _Api:
    refusals: list[str] = []
    for name in MODULES:
        try:
            found: _Api = importlib.import_module(f"{name}._api")
        except ImportError as error:
            refusals.append(str(error))
        else:
            return found
    raise RefitConfigurationError(
        f"the nixl engine needs NIXL's Python package: {'; '.join(refusals)}",
        remedy="pip install nixl (or nixl-cu12 on a machine without CUDA), or use the shm engine",
    )
