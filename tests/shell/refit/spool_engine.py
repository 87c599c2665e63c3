"""A checkpoint engine by plug-in, through files: slow, plain, and hostile to who holds on to views.

A policy worker writes each of its streams into a folder of its own, batch by batch, and rollout
worker r reads those of policy worker r modulo their number. A batch is overwritten as soon as the
next one is asked for, as a bucket would be.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import torch

from rollsync.shell.refit.engines import Batch, CheckpointEngine, Weights

SPOOL = "tests.shell.refit.spool_engine:SpoolCheckpointEngine"


class SpoolCheckpointEngine(CheckpointEngine):
    """Options: `folder` (shared by all workers), `batch_tensors`, `deadline_s`."""

    def __init__(self, bucket_size: int, **engine_kwargs: object) -> None:
        self._folder = str(engine_kwargs["folder"])
        self._batch_tensors = int(str(engine_kwargs.get("batch_tensors", 1)))
        self._deadline_s = float(str(engine_kwargs.get("deadline_s", 60)))
        self._streams = 0
        self._spool = Path()

    def prepare(self) -> dict[str, object]:
        self._spool = Path(tempfile.mkdtemp(dir=self._folder))
        self._streams = 0
        return {"spool": str(self._spool)}

    def init_policy_process_group(self, **topology: object) -> None:
        pass

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[object],
    ) -> None:
        peer = metadata[rollout_rank % train_world_size]
        assert isinstance(peer, dict)
        self._spool = Path(peer["spool"])

    async def send_weights(self, weights: Weights) -> None:
        stream = self._next_stream()
        stream.mkdir(exist_ok=True)
        batch: Batch = []
        written = 0
        try:
            for name, tensor in weights:
                batch.append((name, tensor.detach().clone().contiguous()))
                if len(batch) == self._batch_tensors:
                    _write(stream / f"{written}.batch", batch)
                    batch, written = [], written + 1
        except BaseException as error:
            _write(stream / f"{written}.failed", [(str(error), torch.empty(0))])
            raise
        _write(stream / f"{written}.last", batch)

    async def receive_weight_batches(self) -> AsyncGenerator[Batch, None]:
        stream = self._next_stream()
        number = 0
        while True:
            kind, batch = await self._wait(stream, number)
            if kind == "failed":
                raise ConnectionError(f"the sender gave up: {batch[0][0]}")
            if batch:
                yield batch
                for _, tensor in batch:
                    tensor.zero_()
            if kind == "last":
                return
            number += 1

    def finalize(self) -> None:
        pass

    def _next_stream(self) -> Path:
        self._streams += 1
        return self._spool / str(self._streams)

    async def _wait(self, stream: Path, number: int) -> tuple[str, Batch]:
        async with asyncio.timeout(self._deadline_s):
            while True:
                for kind in ("batch", "last", "failed"):
                    path = stream / f"{number}.{kind}"
                    if path.exists():
                        return kind, torch.load(path)
                await asyncio.sleep(0.002)


def _write(path: Path, batch: Batch) -> None:
    unfinished = path.with_suffix(".unfinished")
    torch.save(batch, unfinished)
    unfinished.rename(path)
