"""TransferQueue as the data plane: it conforms, and a whole save and resume goes over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
import transfer_queue

from rollsync.shell.rollout.data_plane.conformance import CONFORMANCE_CHECKS
from rollsync.shell.rollout.data_plane.transfer_queue import TransferQueueDataPlane
from rollsync.shell.rollout.errors import DataPlaneError
from tests.shell.rollout.world import PARTITION, World, assert_same_rows, row_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def queue() -> Iterator[None]:
    # Its controller and two storage actors each want a core of their own, counted, not used.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    yield
    transfer_queue.close()
    ray.shutdown()


@pytest.mark.asyncio
async def test_it_conforms() -> None:
    for check in CONFORMANCE_CHECKS:
        await check(TransferQueueDataPlane())
    assert await TransferQueueDataPlane().list_rows("unrelated") == {}


@pytest.mark.asyncio
async def test_a_save_and_a_resume_over_it(tmp_path: Path) -> None:
    """The resuming process finds the rows that the one before has left, and starts from its own."""
    world = World(tmp_path, plane=TransferQueueDataPlane())
    await world.ready(0, 1)
    await world.admit(2, 3)
    await world.seal("e0p2", 0)
    await world.buffer.clear_retired()
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    await world.finish("e0p2")
    after = World(tmp_path, plane=TransferQueueDataPlane())
    assert await after.restore() is not None
    owned = ("e0p0/0", "e0p0/1", "e0p1/0", "e0p1/1", "e0p2/0/attempt-0")
    assert_same_rows(await after.rows(), {key: row_of(key) for key in owned})
    await after.plane.clear(PARTITION, owned)
    assert await TransferQueueDataPlane().list_rows(PARTITION) == {}


@pytest.mark.asyncio
async def test_its_errors_are_data_plane_errors() -> None:
    plane = TransferQueueDataPlane()
    await plane.put("errors", {"a": {"x": torch.tensor([1])}})
    await transfer_queue.async_kv_clear(["a"], "errors")
    with pytest.raises(DataPlaneError, match="TransferQueue failed"):
        await plane.get("errors", ["a"])
