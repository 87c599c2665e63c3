"""A checkpoint engine that moves weights through files in a folder that all workers share.

It is the smallest engine that keeps every promise that rollsync makes for one, written to be read
from top to bottom. A stream has a folder of its own, in which its two ends leave files:

    0.weights, 1.weights ...   by the sender: whole tensors, together about one bucket large
    0.loaded-by-3 ...          by rollout worker 3: that file may go
    end                        by the sender: how many there were
    accepted-by-3              by rollout worker 3: all of it is loaded
    failed                     by whoever failed: who, and why; the other ends then fail as well

A file appears whole or not at all, because it is written under another name first. Every worker
has a home folder, and in it a lock that it holds for as long as it lives: whoever waits for a
worker whose lock can be taken waits for a dead one.
"""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import torch
from returns.pipeline import is_successful
from safetensors.torch import load, save

from rollsync.pure.refit import PolicyWorker, RoutingTable, describe, plan_routes
from rollsync.shell.refit.engines import Batch, CheckpointEngine, Weights
from rollsync.shell.refit.engines.batches import ConsumerStop, ReceivedBatches
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost, TransferTimeout
from rollsync.shell.refit.errors import RefitConfigurationError, RefitError

UNREAD: Final = 2
"""Files that a receiver has not loaded yet: while it loads one, the next is written."""
POLL_S: Final = 0.002
_HOME: Final = "worker-"
_ALIVE: Final = "alive"
_REQUEST: Final = "request"
_FAILED: Final = "failed"
_END: Final = "end"


class FileCheckpointEngine(CheckpointEngine):
    """Moves weights through files.

    Args:
        bucket_size: about how many bytes are in one file.
        folder: an existing folder that every worker can write to.
        refit_timeout_s: how long one wait for another worker may take.
        release_after_refit: the synchronizer's, which calls `finalize` after each sync then.
    """

    def __init__(
        self,
        *,
        bucket_size: int,
        folder: str,
        refit_timeout_s: float = 300.0,
        release_after_refit: bool = False,
    ) -> None:
        del release_after_refit
        self._bucket_bytes = bucket_size
        self._folder = Path(folder)
        self._timeout_s = refit_timeout_s
        self._home: Home | None = None
        self._name = ""
        self._rank = 0
        self._receivers: dict[int, Path] = {}
        self._sender = Path()
        self._last_stream: Path | None = None
        self._stage = ""
        self._tensor = ""

    # The set-up. `prepare` does not know yet which side this worker will be on.

    def prepare(self) -> dict[str, object]:
        """Move into a home; sweep up those of workers that were killed."""
        if self._home is None:
            sweep(self._folder)
            self._home = Home(self._folder)
        return {"home": str(self._home.path)}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None:
        """Find the rollout workers that this policy worker feeds."""
        routes, homes = _world(train_world_size, rollout_world_size, metadata)
        self._name = f"policy {worker_rank}"
        self._receivers = {
            rank: homes[train_world_size + rank]
            for rank in routes.receivers_of(PolicyWorker(worker_rank))
        }

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None:
        """Find the policy worker that feeds this rollout worker."""
        routes, homes = _world(train_world_size, rollout_world_size, metadata)
        self._name = f"rollout {rollout_rank}"
        self._rank = rollout_rank
        self._sender = homes[routes.sender_to(rollout_rank).rank]

    def finalize(self) -> None:
        """Move out: to the others this worker is gone."""
        if self._home is not None:
            self._home.leave()
            self._home = None
        self._last_stream = None

    # One stream, from the sender's end.

    async def send_weights(self, weights: Weights) -> None:
        """Send one stream to all rollout workers that this one feeds."""
        if not self._receivers:
            for _ in weights:
                # Making the weights may be a collective that every policy worker has to join.
                pass
            return
        stream = self._own_home() / secrets.token_hex(8)
        stream.mkdir()
        try:
            await self._meet_receivers(stream)
            await self._write_batches(stream, weights)
        except BaseException as error:
            _tell(stream, self._name, f"{type(error).__name__}: {error}")
            raise

    async def _meet_receivers(self, stream: Path) -> None:
        """Wait until every receiver asks for a stream, and say where this one is."""
        self._enter("waited for the rollout workers")
        for home in self._receivers.values():
            await self._until((home / _REQUEST).exists, stream)
            answer = (home / _REQUEST).read_text()
            (home / _REQUEST).unlink()
            _write(home / answer, str(stream).encode())
        # Who asks for a new stream has done with the last one, also if that failed.
        if self._last_stream is not None:
            shutil.rmtree(self._last_stream)
        self._last_stream = stream

    async def _write_batches(self, stream: Path, weights: Weights) -> None:
        written = 0
        for batch in self._batches(weights):
            await self._until_loaded(stream, written - UNREAD)
            _write(stream / f"{written}.weights", batch)
            written += 1
        for number in range(max(written - UNREAD, 0), written):
            await self._until_loaded(stream, number)
        _write(stream / _END, str(written).encode())
        self._enter("waited for the stream's acceptance")
        accepted = [stream / f"accepted-by-{rank}" for rank in self._receivers]
        await self._until(lambda: all(path.exists() for path in accepted), stream)

    def _batches(self, weights: Weights) -> Iterator[bytes]:
        """The contents of the files. The number in front of a name keeps the order."""
        names: set[str] = set()
        batch: dict[str, torch.Tensor] = {}
        batch_bytes = 0
        self._enter("made the weights")
        for name, tensor in weights:
            self._enter("packed", name)
            if name in names:
                raise RefitError(f"two weights are called {name!r}")
            names.add(name)
            if batch and batch_bytes + tensor.nbytes > self._bucket_bytes:
                yield save(batch)
                batch, batch_bytes = {}, 0
            # A copy, because the next weight may be made in the memory of this one.
            logical = tensor.detach().cpu().resolve_conj().resolve_neg()
            batch[f"{len(batch):08} {name}"] = logical.contiguous().clone()
            batch_bytes += tensor.nbytes
            self._enter("made the weights")
        if batch:
            yield save(batch)

    async def _until_loaded(self, stream: Path, number: int) -> None:
        """Wait until all receivers have loaded a file, and delete it."""
        if number < 0:
            return
        self._enter("waited for a file to be loaded")
        loaded = [stream / f"{number}.loaded-by-{rank}" for rank in self._receivers]
        await self._until(lambda: all(path.exists() for path in loaded), stream)
        for path in (stream / f"{number}.weights", *loaded):
            path.unlink()

    # One stream, from the receiver's end.

    def receive_weight_batches(self) -> AsyncGenerator[Batch, None]:
        """Receive one stream. Wrapped, so that the sender hears what the loader died of."""
        return ReceivedBatches(self._receive)

    async def _receive(self, stop: ConsumerStop) -> AsyncGenerator[Batch, None]:
        stream = await self._meet_sender()
        number = 0
        try:
            while await self._is_there(stream, number):
                tensors = load((stream / f"{number}.weights").read_bytes())
                batch = [(key[9:], tensors[key]) for key in sorted(tensors)]
                self._enter("loaded", batch[0][0])
                yield batch
                # The next one is asked for, so this one is loaded.
                _write(stream / f"{number}.loaded-by-{self._rank}", b"")
                number += 1
        except BaseException as error:
            _tell(stream, self._name, stop.describe(error))
            raise
        _write(stream / f"accepted-by-{self._rank}", b"")

    async def _meet_sender(self) -> Path:
        """Ask for a stream, and wait for the answer, which says where it is."""
        self._enter("waited for the sender")
        home = self._own_home()
        answer = home / secrets.token_hex(8)
        _write(home / _REQUEST, answer.name.encode())
        await self._until(answer.exists, None)
        stream = Path(answer.read_text())
        answer.unlink()
        return stream

    async def _is_there(self, stream: Path, number: int) -> bool:
        """Wait for a file; False when the stream ended before it."""
        self._enter("waited for a file")
        weights, end = stream / f"{number}.weights", stream / _END
        await self._until(lambda: weights.exists() or end.exists(), stream)
        if weights.exists():
            return True
        if int(end.read_text()) != number:
            raise RefitError(f"{end.read_text()} files were sent, and {number} have arrived")
        return False

    # Waiting: never for ever, never for the dead, and never for those who have given up.

    async def _until(self, ready: Callable[[], bool], stream: Path | None) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            # Looked at before `ready`: who is done may go.
            gone = [home for home in self._others() if not is_alive(home)]
            if ready():
                return
            if stream is not None and (stream / _FAILED).exists():
                raise PeerFailed((stream / _FAILED).read_text(), **self._where())
            if gone:
                raise PeerLost(f"the worker at {gone[0]} is gone", **self._where())
            if loop.time() > deadline:
                raise TransferTimeout(f"nothing came for {self._timeout_s:g} s", **self._where())
            await asyncio.sleep(POLL_S)

    def _others(self) -> list[Path]:
        return list(self._receivers.values()) or [self._sender]

    def _own_home(self) -> Path:
        if self._home is None:
            raise RefitConfigurationError("the engine is not prepared", remedy="call prepare")
        return self._home.path

    def _enter(self, stage: str, tensor: str = "") -> None:
        self._stage, self._tensor = stage, tensor

    def _where(self) -> dict[str, str]:
        return {"worker": self._name, "stage": self._stage, "tensor": self._tensor}


class Home:
    """A worker's folder, with a lock that the kernel takes away when the worker dies.

    Args:
        folder: where to make it.
    """

    def __init__(self, folder: Path) -> None:
        # It gets its name when it is locked, so that nobody takes it for a dead worker's before.
        new = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
        self._lock: IO[bytes] = open(new / _ALIVE, "wb")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(folder / new.name.replace("new-", _HOME, 1))

    def leave(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path)
        self._lock.close()


def is_alive(home: Path) -> bool:
    """Whether the worker of this home lives."""
    try:
        with open(home / _ALIVE, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def sweep(folder: Path) -> None:
    """Remove the homes of workers that were killed."""
    for home in folder.glob(f"{_HOME}*"):
        if not is_alive(home):
            shutil.rmtree(home, ignore_errors=True)


def _world(
    train_world_size: int, rollout_world_size: int, metadata: Sequence[object]
) -> tuple[RoutingTable, list[Path]]:
    """Who sends to whom, which is not for an engine to decide, and where everybody's home is."""
    routes = plan_routes(train_world_size, rollout_world_size)
    if not is_successful(routes):
        raise RefitConfigurationError(describe(routes.failure()), error=routes.failure())
    homes = [Path(str(each["home"])) for each in metadata if isinstance(each, Mapping)]
    if len(homes) != train_world_size + rollout_world_size:
        raise RefitConfigurationError(
            f"{len(homes)} workers answered of {train_world_size} policy and"
            f" {rollout_world_size} rollout workers",
            remedy="give the world sizes of the workers that run",
        )
    return routes.unwrap(), homes


def _tell(stream: Path, who: str, why: str) -> None:
    """Say why a stream failed, unless another has said so before or removed the stream."""
    if stream.exists() and not (stream / _FAILED).exists():
        _write(stream / _FAILED, f"{who} failed: {why}".encode())


def _write(path: Path, contents: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")
    unfinished.write_bytes(contents)
    unfinished.rename(path)
