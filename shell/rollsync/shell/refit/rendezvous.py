"""Exchanges metadata among all workers of a refit where nobody carries it: vLLM's native backend.

Rule kept here: what another worker says counts only with the run's secret, is plain data, and is
waited for no longer than the deadline.
"""

import datetime
import hashlib
import hmac

import msgspec
from torch._C._distributed_c10d import TCPStore

from rollsync.shell.refit.errors import RefitError

_SEAL_BYTES = hashlib.sha256().digest_size


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
        self._store = TCPStore(
            host,
            port,
            is_master=keeper,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )

    @property
    def port(self) -> int:
        """The store's port."""
        return self._store.port

    def exchange(self, worker: int, workers: int, metadata: object) -> list[object]:
        """Leaves `metadata` as that of `worker`, and answers everybody's in order.

        Raises:
            RefitError: when somebody without the secret answered in a worker's place.
            torch.distributed.DistStoreError: when a worker did not come in time.
        """
        body = msgspec.msgpack.encode(metadata)
        self._store.set(f"worker {worker}", (self._seal(worker, body) + body).hex())
        return [self._read(other) for other in range(workers)]

    def _read(self, worker: int) -> object:
        answer = _from_hex(self._store.get(f"worker {worker}"))
        seal, body = answer[:_SEAL_BYTES], answer[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(worker, body)):
            raise RefitError(
                f"the metadata of worker {worker} does not carry the run's secret",
                remedy="start trainer and engines with the same secret, and on a network of theirs",
            )
        return msgspec.msgpack.decode(body)

    def _seal(self, worker: int, body: bytes) -> bytes:
        return hmac.digest(self._secret, worker.to_bytes(4, "big") + body, "sha256")


def _from_hex(answer: bytes) -> bytes:
    """What was left; nothing, which no seal fits, when a stranger left something else."""
    try:
        return bytes.fromhex(answer.decode("ascii"))
    except ValueError:
        return b""
