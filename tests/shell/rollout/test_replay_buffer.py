"""What the replay buffer does while the data plane takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from rollsync.shell.rollout.data_plane import InProcessDataPlane
from tests.shell.rollout.world import World


class SlowToClear(InProcessDataPlane):
    """Lets others go on before it clears, as a plane in other processes does."""

    async def clear(self, partition_id: str, keys: Iterable[str]) -> None:
        await asyncio.sleep(0.01)
        await super().clear(partition_id, keys)


@pytest.mark.asyncio
async def test_several_clear_at_once(tmp_path: Path) -> None:
    """Each group that is published leaves staged rows, and its publisher clears what is left."""
    world = World(tmp_path, plane=SlowToClear())
    await world.ready(0, 1)
    retired = len(world.cell.state.rows_to_clear)
    assert retired
    cleared = await asyncio.gather(*(world.buffer.clear_retired() for _ in range(3)))
    assert sum(cleared) == retired
    assert not world.cell.state.rows_to_clear
