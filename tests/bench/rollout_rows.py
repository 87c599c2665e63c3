"""1,280 rows of 6 KB on disk: our segment beside pickle, torch and TransferQueue's own checkpoint.

Every way has the same rows. Ours and pickle's file are synced; torch's file and TransferQueue's
checkpoint are what their own calls leave, which sync nothing, so that their times are flattered.
TransferQueue runs in a Ray of its own. Its bytes follow from how rows were put: each pickled row
drags along its part of the batch, which here are 64 rows (batches of 128 over two storage units).
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from rollsync.pure.config import TransferQueuePlaneConfig
from rollsync.shell.rollout.data_plane import StoredRow
from rollsync.shell.rollout.data_plane.queue_service import running_queue
from rollsync.shell.rollout.segments import encode_segment
from tests.bench.measure import figure

ROWS = 1_280
TOKENS = 512
BATCH = 128
CPUS = 16
"""Of the Ray that TransferQueue runs in: with fewer, its start waits without end."""
WHAT = f"{ROWS} rows of 6 KB"


def row(number: int) -> dict[str, torch.Tensor]:
    """512 token ids and as many log probabilities: 6,144 bytes."""
    generator = torch.Generator().manual_seed(number)
    return {
        "token_ids": torch.randint(0, 150_000, (TOKENS,), generator=generator),
        "log_probabilities": torch.randn(TOKENS, generator=generator),
    }


def row_figures() -> list[dict[str, object]]:
    """Bytes and seconds of each way."""
    rows = {f"e0p{number}/0": row(number) for number in range(ROWS)}
    stored = {key: StoredRow(fields=fields, tags={}) for key, fields in rows.items()}
    tensors = sum(
        each.numel() * each.element_size() for fields in rows.values() for each in fields.values()
    )
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        ways: dict[str, Callable[[Path], object]] = {
            "our segment": lambda path: write(path, encode_segment(stored)),
            "pickle": lambda path: write(path, pickle.dumps(rows)),
            "torch.save": lambda path: torch.save(rows, path),
        }
        costs = {name: cost(how, root / name) for name, how in ways.items()}
        costs[f"TransferQueue's save_checkpoint, rows put {BATCH} at a time"] = queue_cost(
            rows, root / "queue"
        )
    ours_bytes, ours_s = costs["our segment"]
    figures = [
        figure(f"bytes of {WHAT}", ours_bytes, "bytes", against=("the tensors", tensors), goal=1.05)
    ]
    for name, (size, seconds) in costs.items():
        if name != "our segment":
            figures += [
                figure(f"bytes of {WHAT}", ours_bytes, "bytes", against=(name, size)),
                figure(
                    f"writing {WHAT}",
                    ours_s * 1e3,
                    "milliseconds",
                    against=(f"{name}, {seconds * 1e3:.0f} ms", seconds * 1e3),
                ),
            ]
    return figures


def write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def cost(how: Callable[[Path], object], path: Path) -> tuple[int, float]:
    """Bytes and the fastest of three times."""
    times = []
    for number in range(3):
        began_s = time.perf_counter()
        how(path.with_name(f"{path.name}-{number}"))
        times.append(time.perf_counter() - began_s)
    return size_of(path.with_name(f"{path.name}-0")), min(times)


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def queue_cost(rows: dict[str, dict[str, torch.Tensor]], path: Path) -> tuple[int, float]:
    """Of TransferQueue's own checkpoint, with all that it holds."""
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    try:
        with running_queue(TransferQueuePlaneConfig()):
            keys = list(rows)
            for start in range(0, ROWS, BATCH):
                batch = keys[start : start + BATCH]
                names = list(rows[batch[0]])
                fields = TensorDict(
                    {name: torch.stack([rows[key][name] for key in batch]) for name in names},
                    batch_size=[len(batch)],
                )
                transfer_queue.kv_batch_put(batch, "rollouts", fields)
            return cost(transfer_queue.save_checkpoint, path)
    finally:
        ray.shutdown()
