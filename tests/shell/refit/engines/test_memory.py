"""How much memory the two ends of a refit have, from sync to sync and from life to life, also of
lives that end in a failure; Python's collector is off, as a trainer may have it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.engines.base import Weights
from rollsync.shell.refit.engines.conformance_workers import IteratorFailed
from tests.shell.refit.engines.peers import PROCESSES, receive_all

MEBIBYTE = 1024 * 1024
BUCKET_BYTES = 16 * MEBIBYTE
"""Of a size that the heap would serve, and keep."""
SYNCS = 20
LIVES = 3


def reserved_bytes() -> int:
    """Anonymous and shared memory of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


async def one_sync(
    sender: CheckpointEngine, receiver: CheckpointEngine, weight: torch.Tensor
) -> None:
    await asyncio.gather(sender.send_weights([("weight", weight)]), receive_all(receiver))


def failing_at_the_end(
    large: torch.Tensor, weight: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor that no buffer can hold, one for which the buffers have to be free of it again, so
    that the receiver has loaded it by then, and an error."""
    yield "large", large
    yield "weight", weight
    raise IteratorFailed("no more weights")


async def failing_sync(
    sender: CheckpointEngine, receiver: CheckpointEngine, weights: Weights
) -> list[object]:
    """The errors of both ends; the receiver's has what it loaded last."""
    return list(
        await asyncio.gather(
            sender.send_weights(weights), receive_all(receiver), return_exceptions=True
        )
    )


def measure(pipe: Connection, backend: str) -> None:
    """Reports the memory of each life: before it, after each sync, and after its end."""
    sender, receiver = (
        create_checkpoint_engine(backend, bucket_size_bytes=BUCKET_BYTES, engine_kwargs={})
        for _ in range(2)
    )
    # Fills both buffers of each end, and then the memory for what these cannot hold.
    weight, large = torch.zeros(2 * BUCKET_BYTES // 4), torch.zeros(3 * BUCKET_BYTES // 4)
    gc.disable()
    # They are kept, with all that they have.
    errors: list[object] = []
    for _ in range(LIVES):
        measured = [reserved_bytes()]
        metadata: list[object] = [sender.prepare(), receiver.prepare()]
        worlds = {"train_world_size": 1, "rollout_world_size": 1}
        receiver.init_rollout_process_group(rollout_rank=0, metadata=metadata, **worlds)
        sender.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
        for _ in range(SYNCS):
            asyncio.run(one_sync(sender, receiver, weight))
            measured.append(reserved_bytes())
        errors += asyncio.run(failing_sync(sender, receiver, failing_at_the_end(large, weight)))
        sender.finalize()
        receiver.finalize()
        measured.append(reserved_bytes())
        pipe.send(measured)
    pipe.send([type(each).__name__ for each in errors])


@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_twenty_syncs_reserve_what_one_does_and_finalize_gives_it_back(backend: str) -> None:
    mine, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=measure, args=(theirs, backend), daemon=True)
    process.start()
    theirs.close()
    # What the first life loads once, libraries and pools, is not the buffers'.
    mine.recv()
    for _ in range(LIVES - 1):
        before, *synced, after = mine.recv()
        assert synced[0] - before >= 2 * BUCKET_BYTES
        assert max(synced) - synced[0] < BUCKET_BYTES // 2
        assert after - before < BUCKET_BYTES // 2
    assert mine.recv() == ["IteratorFailed", "PeerFailed"] * LIVES
    process.join()
    process.close()
