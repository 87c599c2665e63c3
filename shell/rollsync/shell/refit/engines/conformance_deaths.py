"""A policy worker of the conformance suite that is killed in the middle of its stream.

Rule kept here: it dies as the kernel would end it for memory, and has told nobody.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from rollsync.shell.refit.engines.base import CheckpointEngine
from rollsync.shell.refit.engines.conformance_workers import (
    BUCKET_BYTES,
    PROCESSES,
    sample_weights,
)
from rollsync.shell.refit.engines.factory import create_checkpoint_engine
from rollsync.shell.refit.engines.kept_errors import run_stream

WORLDS = {"train_world_size": 1, "rollout_world_size": 1}


class DyingPolicy:
    """The policy worker of one rollout worker, which is in this process.

    Args:
        backend: the engine's name.
        engine_kwargs: its options.
        environment: variables that the policy worker has in its environment.
        dies_at: the sample that it is killed before.
    """

    def __init__(
        self,
        backend: str,
        engine_kwargs: Mapping[str, object],
        environment: Mapping[str, str],
        dies_at: str,
    ) -> None:
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(
            target=_send,
            args=(theirs, backend, dict(engine_kwargs), dict(environment), dies_at),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> DyingPolicy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.join()

    def send_to(self, rollout: CheckpointEngine) -> None:
        """Connect both, and begin the stream."""
        metadata: list[object] = [self._pipe.recv(), rollout.prepare()]
        self._pipe.send(metadata)
        rollout.init_rollout_process_group(rollout_rank=0, metadata=metadata, **WORLDS)


def _send(
    pipe: Connection,
    backend: str,
    engine_kwargs: Mapping[str, object],
    environment: Mapping[str, str],
    dies_at: str,
) -> None:
    os.environ.update(environment)
    engine = create_checkpoint_engine(
        backend, bucket_size_bytes=BUCKET_BYTES, engine_kwargs=engine_kwargs
    )
    pipe.send(engine.prepare())
    engine.init_policy_process_group(worker_rank=0, metadata=pipe.recv(), **WORLDS)
    run_stream(engine.send_weights(_weights(dies_at)))


def _weights(dies_at: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in sample_weights().items():
        if name == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield name, tensor
