"""The trainer's half of rollsync as vLLM's own weight-transfer backend.

Rules kept here: the engines are told over vLLM's client, which is waited for with a deadline, and
the weights move beside it; an error of either side reaches the callers of `send_weights`, within
seconds where they would wait for the other side in vain; and what a source's `metadata()` says will
come is what both sides hold each stream to, so that they disagree before the first weight if they
do, and a rank of several is sent no more than it keeps.
"""

import rollsync.shell.refit.vllm_version  # noqa: F401

# isort: split
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, Self

import msgspec
import torch
from torch.distributed import DistError
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.patience import parse_timeout, refit_timeout
from rollsync.shell.refit.beside import answered_in, begun
from rollsync.shell.refit.errors import (
    RefitConfigurationError,
    RefitError,
    WeightMismatch,
    accepted,
)
from rollsync.shell.refit.refit_sender import RefitSender
from rollsync.shell.refit.rendezvous import Rendezvous
from rollsync.shell.refit.weights import dtype_name

_LISTEN_EVERY_S: Final = 0.2


@dataclass
class RollsyncTrainerInitInfo(TrainerInitInfo):
    """How a trainer's workers and the engines' meet.

    Attributes:
        engine: a checkpoint engine's name, or `module:ClassName`.
        bucket_size_bytes: bytes of one transfer buffer.
        rollout_world_size: workers of all engines together.
        train_world_size: trainer workers.
        engine_kwargs: the engine's options.
        host: address of trainer rank 0, as all workers reach it.
        port: its port; 0 chooses one, which only a trainer of one worker can use.
        secret: the run's, in hexadecimal; empty makes one, likewise.
        timeout_s: how long the rendezvous may take, and each call of the engines beside a stream.
    """

    backend: ClassVar[str] = "rollsync"

    engine: str
    bucket_size_bytes: int
    rollout_world_size: int
    train_world_size: int = 1
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    secret: str = ""
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.train_world_size > 1 and not (self.port and self.secret):
            raise RefitConfigurationError(
                f"{self.train_world_size} trainer workers need a port and a secret to meet",
                remedy="give all of them the same port and the same secret",
            )
        self.secret = self.secret or secrets.token_hex(32)

    def _check_numbers(self) -> None:
        """Before an engine waits for what would be refused here."""
        accepted(parse_timeout("timeout_s", self.timeout_s))
        accepted(refit_timeout(self.engine_kwargs))
        for name, number, least, most in (
            ("bucket_size_bytes", self.bucket_size_bytes, 1, None),
            ("train_world_size", self.train_world_size, 1, None),
            ("rollout_world_size", self.rollout_world_size, 1, None),
            ("rank", self.rank, 0, self.train_world_size - 1),
            ("port", self.port, 0, 65535),
        ):
            if number < least or (most is not None and number > most):
                allowed = f"at least {least}" if most is None else f"from {least} to {most}"
                raise RefitConfigurationError(f"{name} is {number}", remedy=f"give {allowed}")


class RollsyncTrainerWeightTransferEngine(TrainerWeightTransferEngine[RollsyncTrainerInitInfo]):
    """Sends a source's weights through a checkpoint engine."""

    init_info_cls = RollsyncTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        sender: RefitSender,
        declared: Sequence[TensorSpec],
        init_info: RollsyncTrainerInitInfo,
        rendezvous: Rendezvous,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._weights = source
        self._sender = sender
        self._declared = frozenset(spec.name for spec in declared)
        self._timeout_s = init_info.timeout_s
        # Where the first worker leaves word for the others; where there are none, its port is free.
        self._word = rendezvous if init_info.train_world_size > 1 else None
        self._updates = 0
        self._sent = 0
        self._sending = threading.Lock()

    @classmethod
    def trainer_init(
        cls,
        init_info: RollsyncTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Meets the engines' workers; called on every trainer worker.

        Raises:
            RefitConfigurationError: there is no source, or it has only part of the weights here, or
                what its `metadata()` says cannot be used.
            RefitError: the engines refused, which is the cause, or somebody did not come in time.
        """
        if source is None:
            raise RefitConfigurationError(
                "the rollsync backend sends whole policies", remedy="give it a WeightSource"
            )
        declared = _declared(source)
        sender = RefitSender(rank=init_info.rank)
        rendezvous = Rendezvous(
            init_info.host,
            init_info.port,
            bytes.fromhex(init_info.secret),
            timeout_s=init_info.timeout_s,
            keeper=init_info.is_sender,
        )
        # What this side refuses itself, it refuses before an engine waits for it.
        sender.init(init_info.engine, init_info.bucket_size_bytes, init_info.engine_kwargs)
        prepared = sender.prepare()
        told: Future[None] | None = None
        try:
            if init_info.is_sender:
                message = _worker_init_info(init_info, rendezvous.port, declared)
                told = begun(partial(client.init_weight_transfer_engine, message))
            metadata = rendezvous.exchange(
                init_info.rank,
                init_info.train_world_size + init_info.rollout_world_size,
                prepared,
                meanwhile=lambda: _check_accepted(told),
            )
            sender.declare(declared)
            sender.init_process_group(
                metadata=metadata,
                train_world_size=init_info.train_world_size,
                rollout_world_size=init_info.rollout_world_size,
            )
            if told is not None:
                _joined(told, init_info.timeout_s)
        except BaseException:
            sender.finalize()
            raise
        return cls(
            client=client,
            source=source,
            sender=sender,
            declared=declared,
            init_info=init_info,
            rendezvous=rendezvous,
        )

    def send_weights(self, weight_version: int | None = None) -> None:
        """One whole update of all engines; called on every trainer worker.

        Args:
            weight_version: the trainer version of the weights; None counts the updates.

        Raises:
            RefitError: another send is running; or the engines refused, which is the cause.
            WeightMismatch: the source yields what its `metadata()` did not declare.
            Exception: whatever else went wrong on either side.
        """
        if not self._sending.acquire(blocking=False):
            raise RefitError(
                "a send is running already, and two at once would wait for each other",
                remedy="call send_weights again when it has returned",
            )
        try:
            self._send(weight_version)
        finally:
            self._sending.release()

    def _send(self, weight_version: int | None) -> None:
        version = self._sent if weight_version is None else weight_version
        self._updates += 1
        if self.is_sender:
            try:
                self._update(version)
            except BaseException as error:
                self._tell_others(error)
                raise
        else:
            self._send_beside_the_first(version)
        self._sent = version + 1

    def _update(self, version: int) -> None:
        """The first worker's part: its own stream, and the engines' calls."""
        self._call("start_weight_update", self.client.start_weight_update)
        received = begun(partial(self.client.update_weights, {}))
        try:
            self._stream(version, received)
        except BaseException as error:
            self._tell_others(error)
            # Nothing may be asked of the engines while they are at it, if they end it at all.
            wait([received], timeout=self._timeout_s)
            raise
        _ended("update_weights", received, self._timeout_s)
        finish = partial(self.client.finish_weight_update, weight_version=str(version))
        self._call("finish_weight_update", finish)

    def _send_beside_the_first(self, version: int) -> None:
        ended = threading.Event()
        try:
            self._stream(version, begun(partial(self._listen, self._updates, ended)))
        finally:
            ended.set()

    def _stream(self, version: int, receiving: Future[None]) -> None:
        self._sender.send(self._as_declared(), weight_version=lambda: version, receiving=receiving)

    def _call(self, name: str, call: Callable[[], None]) -> None:
        _ended(name, begun(call), self._timeout_s)

    def _tell_others(self, error: BaseException) -> None:
        if self._word is not None:
            with suppress(DistError):
                self._word.tell_failure(self._updates, f"{type(error).__name__}: {error}")

    def _listen(self, update: int, ended: threading.Event) -> None:
        """Wait until this worker's stream has ended.

        Raises:
            RefitError: the first worker says that the update has failed.
        """
        # A first worker that is gone may have had what it wanted.
        with suppress(DistError):
            while not ended.wait(_LISTEN_EVERY_S):
                why = None if self._word is None else self._word.failure_of(update)
                if why is not None:
                    raise RefitError(
                        f"trainer rank 0 has given this update up: {why}",
                        remedy="see what it says there",
                    )

    def _as_declared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The source's weights, none of which may be one that it did not declare."""
        for name, tensor in self._weights:
            if name not in self._declared:
                raise WeightMismatch(
                    f"the source yields {name!r}, which its metadata() does not declare",
                    tensor=name,
                    remedy="have metadata() and the source's iterator agree, in their order too",
                )
            yield name, tensor

    def shutdown(self) -> None:
        """Gives back what the checkpoint engine reserved, and the rendezvous' port."""
        self._word = None
        self._sender.finalize()


def _declared(source: WeightSource) -> tuple[TensorSpec, ...]:
    """What every stream of a source will hold, in its order."""
    if source.held_names() is not None:
        raise RefitConfigurationError(
            "the source has only part of the weights on this trainer worker",
            remedy="give every trainer worker a source that yields all of them, gathered",
        )
    return tuple(
        _spec(each.name, tuple(each.shape), dtype_name(each.dtype)) for each in source.metadata()
    )


def _spec(name: object, shape: tuple[object, ...], dtype: str) -> TensorSpec:
    """As the engines will read it, which they would refuse otherwise."""
    try:
        return msgspec.convert((name, shape, dtype), TensorSpec)
    except msgspec.ValidationError as error:
        raise RefitConfigurationError(
            f"the source's metadata() has an entry {name!r} of shape {shape}, which is none of a"
            f" tensor: {error}",
            remedy="answer names as strings, and shapes as integers",
        ) from error


def _joined(told: Future[None], timeout_s: float) -> None:
    """Waits until the engines have joined."""
    wait([told], timeout=timeout_s)
    _check_accepted(told)
    _ended("init_weight_transfer_engine", told, timeout_s)


def _ended(name: str, answer: Future[None], timeout_s: float) -> None:
    """Waits for the end of a call of the engines."""
    answered_in(timeout_s, answer, who=f"the engines have not ended {name}", setting="timeout_s")


def _check_accepted(told: Future[None] | None) -> None:
    """Raises `RefitError` if the engines have refused what they were told."""
    failure = told.exception() if told is not None and told.done() else None
    if failure is not None:
        raise RefitError(
            f"the engines refused to join the weight transfer: {type(failure).__name__}: {failure}",
            remedy="put right what they refuse; they take this backend when started with"
            ' weight_transfer_config={"backend": "rollsync"}',
        ) from failure


def _worker_init_info(
    init_info: RollsyncTrainerInitInfo, port: int, declared: Sequence[TensorSpec]
) -> dict[str, object]:
    return {
        "engine": init_info.engine,
        "bucket_size_bytes": init_info.bucket_size_bytes,
        "host": init_info.host,
        "port": port,
        "secret": init_info.secret,
        "train_world_size": init_info.train_world_size,
        "rollout_world_size": init_info.rollout_world_size,
        "declared": msgspec.to_builtins(declared),
        "engine_kwargs": init_info.engine_kwargs,
        "timeout_s": init_info.timeout_s,
    }
