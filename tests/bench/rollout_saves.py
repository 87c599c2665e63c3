"""What a snapshot after a few changes costs beside how much a run has in flight, and a restore
beside decoding the state.

The run has so many admitted groups; after a first snapshot, some attempts begin and a second one
is taken, on the real store. The time of a save is all processor time of this process.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from rollsync.codecs import decode, encode
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.store.filesystem import RealFileSystem
from tests.bench.measure import figure
from tests.pure.rollout.events_kit import admit, dispatch, reserve
from tests.shell.rollout.world import World

SIZES = (1_000, 10_000, 100_000)
CHANGES = 100
REPETITIONS = 3
MOST_CPU_S = 0.6


def save_figures() -> list[dict[str, object]]:
    """Bytes and processor time of a later snapshot by size, and restore beside decode."""
    found: list[dict[str, object]] = []
    first: tuple[str, float] | None = None
    for groups in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            written, cpu_s, ratios = asyncio.run(_measured(Path(directory), groups))
        name = f"bytes of a snapshot after {CHANGES} new of {groups}"
        first = first or (name, float(written))
        found.append(figure(name, written, "bytes", against=first, goal=1.1))
        found.append(
            figure(
                f"processor time of a snapshot after {CHANGES} new of {groups}",
                cpu_s,
                "seconds",
                against=("the most that one a minute may take", MOST_CPU_S),
                goal=1.0,
            )
        )
        restore_s, decode_s = ratios
        found.append(
            figure(
                f"restore of {groups} groups",
                restore_s,
                "seconds",
                against=(f"decoding the state of {groups} groups", decode_s),
                goal=3.0 if groups == SIZES[-1] else None,
            )
        )
    return found


async def _measured(root: Path, groups: int) -> tuple[int, float, tuple[float, float]]:
    """Bytes and processor seconds of a save; seconds of a restore, and of decoding the state."""
    world = _world(root, groups)
    await world.do(reserve(*range(groups)))
    await world.do(admit(world.state, *range(groups)))
    await _save(world)
    await world.do(*(dispatch(f"e0p{number}", 0) for number in range(CHANGES)))
    before, began_s = _size(root), time.process_time()
    await _save(world)
    cpu_s, written = time.process_time() - began_s, _size(root) - before
    data = encode(world.state)
    world.die()
    restores, decodes = [], []
    for _ in range(REPETITIONS):
        began_s = time.perf_counter()
        decode(data, RolloutState).unwrap()
        decodes.append(time.perf_counter() - began_s)
        resumed = _world(root, groups)
        began_s = time.perf_counter()
        await resumed.restore()
        restores.append(time.perf_counter() - began_s)
        resumed.die()
    return written, cpu_s, (statistics.median(restores), statistics.median(decodes))


def _world(root: Path, groups: int) -> World:
    world = World(root, store_on=RealFileSystem())
    world.samples.contents = {f"s{index}": f"c{index}" for index in range(groups)}
    return world


async def _save(world: World) -> None:
    result = await world.snapshotter.save_rollout_snapshot()
    if not result.saved:
        raise RuntimeError(f"not saved: {result.reason}, {world.snapshotter.last_error}")


def _size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
