"""Exchanges metadata among all workers of a refit where nobody carries it: vLLM's native backend.

Rule kept here: what another worker says counts only with the run's secret, is plain data, and is
waited for no longer than the deadline; and since the store's own calls wait for ever for a keeper
that is halted, whoever makes one can do without its return.
"""

import datetime
import hashlib
import hmac
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from rollsync.shell.refit.beside import answered_in, begun
from rollsync.shell.refit.errors import RefitError

_T = TypeVar("_T")
_SEAL_BYTES = hashlib.sha256().digest_size
_LOOK_EVERY_S: Final = 0.02
_LAST_WORDS_S: Final = 2.0
"""How long the meeting itself may take to say that it has failed, which says more."""


class Rendezvous:
    """One place where every worker of both sides leaves its metadata and finds the others'.

    Args:
        host: address of the worker that keeps the store.
        port: its port; 0 lets the keeper choose one.
        secret: the run's; who does not know it is not believed.
        timeout_s: how long a worker waits for all others.
        keeper: whether this process keeps the store.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, *, timeout_s: float, keeper: bool = False
    ) -> None:
        self._secret = secret
        self._keeper = keeper
        self._timeout_s = timeout_s
        opened = begun(
            lambda: TCPStore(
                host,
                port,
                is_master=keeper,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        )
        try:
            self._store = self._in_time(opened)
        except DistError as error:
            raise RefitError(
                f"the rendezvous at {host}:{port} cannot be "
                + ("kept" if keeper else f"reached within {timeout_s:g} s"),
                remedy="give all workers the address of trainer rank 0, and a port that is free"
                " there and that every host of theirs reaches",
            ) from error

    @property
    def port(self) -> int:
        """The store's port."""
        return self._store.port

    def exchange(
        self,
        worker: int,
        workers: int,
        metadata: object,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[object]:
        """Leaves `metadata` as that of `worker`, and answers everybody's in order.

        Args:
            meanwhile: called again and again while somebody is missing; what it raises ends the
                wait.

        Raises:
            RefitError: when a worker did not come in time, the keeper ended or does not answer, or
                somebody without the secret answered in a worker's place.
        """
        return self._in_time(begun(lambda: self._exchange(worker, workers, metadata, meanwhile)))

    def tell_failure(self, update: int, why: str) -> None:
        """Leaves word, as the keeper, that an update has failed."""
        body = why.encode()
        self._store.set(_key_failed(update), (self._seal_failed(update, body) + body).hex())

    def failure_of(self, update: int) -> str | None:
        """Why an update has failed, if the keeper has left word of that. May never return.

        Raises:
            DistError: the keeper is gone.
        """
        if not self._store.check([_key_failed(update)]):
            return None
        seal, body = _parted(self._store.get(_key_failed(update)))
        genuine = hmac.compare_digest(seal, self._seal_failed(update, body))
        return body.decode() if genuine else None

    def _in_time(self, answer: Future[_T]) -> _T:
        return answered_in(
            self._timeout_s + _LAST_WORDS_S,
            answer,
            who="trainer rank 0, who keeps the rendezvous, has not answered",
            setting="timeout_s",
        )

    def _exchange(
        self,
        worker: int,
        workers: int,
        metadata: object,
        meanwhile: Callable[[], None] | None,
    ) -> list[object]:
        body = msgspec.msgpack.encode(metadata)
        waiting = _Waiting(self._store, workers, self._timeout_s, meanwhile)
        try:
            self._store.set(_key(worker), (self._seal(worker, body) + body).hex())
            answers: list[object] = []
            for other in range(workers):
                waiting.wait_for(other, _key)
                answers.append(self._opened(other, self._store.get(_key(other))))
            self._store.set(_key_read(worker), "")
            if self._keeper:
                # The store ends with this process's part of the meeting.
                for other in range(workers):
                    waiting.wait_for(other, _key_read)
        except DistError as error:
            raise RefitError(
                "the rendezvous ended before all workers had met: trainer rank 0 is gone",
                remedy="see that worker's log for why it ended",
            ) from error
        return answers

    def _opened(self, worker: int, sealed: bytes) -> object:
        seal, body = _parted(sealed)
        if not hmac.compare_digest(seal, self._seal(worker, body)):
            raise RefitError(
                f"the metadata of worker {worker} does not carry the run's secret",
                remedy="start trainer and engines with the same secret, and on a network of theirs",
            )
        return msgspec.msgpack.decode(body)

    def _seal(self, worker: int, body: bytes) -> bytes:
        return hmac.digest(self._secret, worker.to_bytes(4, "big") + body, "sha256")

    def _seal_failed(self, update: int, body: bytes) -> bytes:
        return hmac.digest(self._secret, f"{_key_failed(update)}: ".encode() + body, "sha256")


class _Waiting:
    """Waits for what workers leave in a store, all of it within one deadline."""

    def __init__(
        self,
        store: TCPStore,
        workers: int,
        timeout_s: float,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        self._store = store
        self._workers = workers
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._meanwhile = meanwhile

    def wait_for(self, worker: int, key_of: Callable[[int], str]) -> None:
        while not self._store.check([key_of(worker)]):
            if self._meanwhile is not None:
                self._meanwhile()
            if time.monotonic() > self._deadline_s:
                raise self._missing(key_of)
            time.sleep(_LOOK_EVERY_S)

    def _missing(self, key_of: Callable[[int], str]) -> RefitError:
        missing = [str(w) for w in range(self._workers) if not self._store.check([key_of(w)])]
        return RefitError(
            f"worker {', '.join(missing)} of {self._workers} (counted from 0, trainer workers"
            f" first) did not come to the rendezvous within {self._timeout_s:g} s",
            remedy="see the log of that worker; check train_world_size and rollout_world_size, or"
            " raise timeout_s if it is only slow",
        )


def _key(worker: int) -> str:
    return f"worker {worker}"


def _key_read(worker: int) -> str:
    return f"worker {worker} has read"


def _key_failed(update: int) -> str:
    return f"update {update} has failed"


def _parted(sealed: bytes) -> tuple[bytes, bytes]:
    """The seal, and what was left under it; nothing, which no seal fits, when a stranger left
    something else."""
    try:
        left = bytes.fromhex(sealed.decode("ascii"))
    except ValueError:
        left = b""
    return left[:_SEAL_BYTES], left[_SEAL_BYTES:]
