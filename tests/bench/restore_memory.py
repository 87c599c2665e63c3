"""What a restore needs of memory beside the rows that it loads, with few segments and with many.

Each restore runs in a process of its own, whose peak the kernel counts. Rule that this shows: rows
are validated and loaded a segment at a time, so the rest does not grow with their sum.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import tempfile
from pathlib import Path

import torch

from rollsync.shell.rollout.data_plane import Row
from rollsync.shell.store import RealFileSystem
from tests.bench.measure import figure
from tests.pure.rollout.events_kit import dispatch, seal
from tests.shell.rollout.world import World

SEGMENT_BYTES = 16 * 1024 * 1024
ROWS_PER_SEGMENT = 4
FEW, MANY = 2, 16


def memory_figures() -> list[dict[str, object]]:
    """Megabytes beside what is loaded."""
    few, many = (extra_bytes(segments) / 1e6 for segments in (FEW, MANY))
    megabytes = SEGMENT_BYTES // 1024 // 1024
    return [
        figure(
            f"memory of a restore beside the rows that it loads, {MANY} segments of "
            f"{megabytes} MiB",
            many,
            "megabytes",
            against=(f"the same, {FEW} segments", few),
            goal=2.0,
        )
    ]


def extra_bytes(segments: int) -> int:
    """Of a restore of so many row segments, at its peak."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory, context.Pool(1) as pool:
        root = Path(directory)
        asyncio.run(save(root, segments))
        return pool.apply(measured, (root, segments))


async def save(root: Path, segments: int) -> None:
    """One segment a save."""
    world = World(root, store_on=RealFileSystem())
    for position in range(0, segments * ROWS_PER_SEGMENT // 2, ROWS_PER_SEGMENT // 2):
        batch = range(position, position + ROWS_PER_SEGMENT // 2)
        await world.admit(*batch)
        for group in batch:
            for sibling in range(2):
                await world.do(dispatch(f"e0p{group}", sibling))
                event = seal(f"e0p{group}", sibling)
                rows = {key: large_row(group) for key in event.staged_keys}
                await world.buffer.seal(event, rows)
        result = await world.snapshotter.save_rollout_snapshot()
        if not result.saved:
            raise RuntimeError(f"{result.reason}: {world.snapshotter.last_error}")
    world.die()


def large_row(seed: int) -> Row:
    """A quarter of a segment."""
    generator = torch.Generator().manual_seed(seed)
    size = SEGMENT_BYTES // ROWS_PER_SEGMENT
    return {"token_ids": torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)}


def measured(root: Path, segments: int) -> int:
    """Restore here; the peak less what was there before and what is loaded."""
    world = World(root, store_on=RealFileSystem())
    Path("/proc/self/clear_refs").write_text("5")  # The peak counts from now on.
    before = memory("VmHWM")
    asyncio.run(world.restore())
    peak = memory("VmHWM")
    rows = asyncio.run(world.rows())
    loaded = sum(each.numel() for row in rows.values() for each in row.values())
    if loaded != segments * SEGMENT_BYTES:
        raise RuntimeError(f"{loaded} bytes were loaded, not all of {segments} segments")
    return peak - before - loaded


def memory(what: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"the kernel does not say {what}")
    return int(found[1]) * 1024


if __name__ == "__main__":
    print(*memory_figures(), sep="\n")
