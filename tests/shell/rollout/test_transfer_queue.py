"""TransferQueue as the data plane: it conforms, a whole save and resume goes over it, and what goes
wrong in it is an error in time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import ray
import torch
import transfer_queue
from tensordict import NonTensorStack, TensorDict

from rollsync.pure.config import TransferQueuePlaneConfig
from rollsync.shell.cluster import cluster_nodes
from rollsync.shell.rollout.data_plane import StoredRow, queue_service
from rollsync.shell.rollout.data_plane.conformance import CONFORMANCE_CHECKS
from rollsync.shell.rollout.data_plane.queue_service import QueueActors, running_queue
from rollsync.shell.rollout.data_plane.transfer_queue import TransferQueueDataPlane
from rollsync.shell.rollout.errors import DataPlaneError, DataPlaneLost
from tests.shell.actor_processes import QUEUE_CONTROLLER, QUEUE_STORAGE, actor_processes
from tests.shell.rollout.world import PARTITION, World, assert_same_rows, row_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
CPUS = 4
NEVER_S = 3600.0


@pytest.fixture(scope="class")
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def nobody_left() -> None:
    """Actors of the queue before, which Ray ends in its own time, are no more taken for this
    test's."""
    while actor_processes(os.getpid(), (*QUEUE_CONTROLLER, *QUEUE_STORAGE)):
        time.sleep(0.01)


@pytest.fixture(scope="class", params=["simple", "ray"])
def queue(local_ray: None, request: pytest.FixtureRequest) -> Iterator[None]:
    storage: Literal["simple", "ray"] = request.param
    with running_queue(TransferQueuePlaneConfig(storage=storage)):
        yield


@pytest.mark.usefixtures("queue")
class TestRunning:
    """What works, over each kind of storage."""

    @pytest.mark.asyncio
    async def test_it_conforms(self) -> None:
        for check in CONFORMANCE_CHECKS:
            await check(TransferQueueDataPlane())
        assert await TransferQueueDataPlane().list_rows("unrelated") == {}

    @pytest.mark.asyncio
    async def test_a_save_and_a_resume_over_it(self, tmp_path: Path) -> None:
        """The resuming process finds the rows that the one before has left, and starts from its
        own."""
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
    async def test_a_restore_that_died_half_way_is_done_again(self, tmp_path: Path) -> None:
        """The queue's own load is not undone when it fails; here the next one starts over."""
        world = World(tmp_path, plane=TransferQueueDataPlane())
        await world.ready(0, 1)
        await world.buffer.clear_retired()
        assert (await world.snapshotter.save_rollout_snapshot()).saved
        owned = ("e0p0/0", "e0p0/1", "e0p1/0", "e0p1/1")
        half = TransferQueueDataPlane()
        await half.clear(PARTITION, await half.list_rows(PARTITION))
        await half.put(PARTITION, {"e0p0/0": row_of("e0p0/0"), "left": row_of("left")})
        again = World(tmp_path, plane=TransferQueueDataPlane())
        assert await again.restore() is not None
        assert_same_rows(await again.rows(), {key: row_of(key) for key in owned})
        await again.plane.clear(PARTITION, owned)

    @pytest.mark.asyncio
    async def test_a_row_that_is_gone_is_a_data_plane_error(self) -> None:
        plane = TransferQueueDataPlane()
        await plane.put("gone", {"a": {"x": torch.tensor([1])}})
        await transfer_queue.async_kv_clear(["a"], "gone")
        with pytest.raises(DataPlaneError, match="TransferQueue failed"):
            await plane.get("gone", ["a"])

    @pytest.mark.asyncio
    async def test_what_another_process_writes_is_noticed(self) -> None:
        """The queue takes any number of writers; a row of this run that another replaces would be
        saved and trained as its own."""
        mine, other = TransferQueueDataPlane(), TransferQueueDataPlane()
        row = {"x": torch.tensor([1])}
        await mine.put("shared", {"a": row, "b": row})
        pinned = mine.pin("shared")
        await other.put("shared", {"a": row})
        await transfer_queue.async_kv_batch_put(
            keys=["b"],
            partition_id="shared",
            fields=TensorDict({"rollsync_row": NonTensorStack(b"of no run")}, batch_size=[1]),
        )
        for key in ("a", "b"):
            with pytest.raises(DataPlaneError, match=f"row {key} is not as this run has written"):
                await mine.get("shared", [key])
            with pytest.raises(DataPlaneError, match=f"row {key} is not as this run has written"):
                await pinned.get([key])
        pinned.release()
        with pytest.raises(DataPlaneError, match="row a is not as this run has written"):
            await mine.list_rows("shared")

    @pytest.mark.asyncio
    async def test_a_write_that_was_given_up_and_comes_through_is_noticed(self) -> None:
        """A put that misses its deadline may still arrive; nobody may take it for the old row."""
        plane = TransferQueueDataPlane()
        await plane.put("late", {"a": {"x": torch.tensor([1])}})
        giving_up = asyncio.ensure_future(plane.put("late", {"a": {"x": torch.tensor([2])}}))
        pinned = None
        while pinned is None:
            await asyncio.sleep(0)
            giving_up.cancel()
            if giving_up.done():
                pinned = plane.pin("late")
        await asyncio.sleep(0.2)
        found = await asyncio.gather(pinned.get(["a"]), return_exceptions=True)
        pinned.release()
        assert [_what_came(each) for each in found] in (["the old row"], ["refused"])

    def test_a_second_run_on_the_cluster_is_refused(self) -> None:
        """It would be attached to this one's queue, and lose it with this one."""
        config = TransferQueuePlaneConfig(deadline_s=0.3)
        with (
            pytest.raises(DataPlaneError, match="already has a TransferQueue"),
            running_queue(config),
        ):
            pass


def _what_came(found: dict[str, StoredRow] | BaseException) -> str:
    if isinstance(found, DataPlaneError):
        return "refused" if "not as this run has written it" in str(found) else str(found)
    if isinstance(found, BaseException):
        return repr(found)
    return {1: "the old row", 2: "the new row"}[int(found["a"].fields["x"].item())]


@pytest.mark.usefixtures("local_ray", "nobody_left")
class TestFailing:
    """What makes TransferQueue wait without end."""

    def test_too_few_cpus_are_named_before_the_start(self) -> None:
        with (
            pytest.raises(DataPlaneError, match=r"needs 5 free CPUs.*4 of 4 CPU free"),
            running_queue(TransferQueuePlaneConfig(storage_units=CPUS, deadline_s=0.3)),
        ):
            pass

    def test_cpus_that_become_free_are_waited_for(self) -> None:
        hog = ray.remote(num_cpus=CPUS)(lambda: time.sleep(3)).remote()
        with running_queue(TransferQueuePlaneConfig(storage_units=1)):
            assert sum(node.available.get("CPU", 0.0) for node in cluster_nodes()) == CPUS - 2
        ray.get(hog)

    @pytest.mark.parametrize(
        ("storage", "classes", "name"),
        [
            ("simple", QUEUE_STORAGE, "TransferQueueStorageUnit#[01]"),
            ("ray", QUEUE_CONTROLLER, "TransferQueueController"),
        ],
    )
    def test_a_queue_whose_actor_dies_says_so(
        self, storage: Literal["simple", "ray"], classes: tuple[str, ...], name: str
    ) -> None:
        """The queue itself would wait for its answer for ever; and long before the deadline."""

        async def use(actors: QueueActors) -> None:
            plane = TransferQueueDataPlane(gone=actors.gone, deadline_s=NEVER_S)
            rows = {key: {"x": torch.tensor([1])} for key in ("a", "b")}
            await plane.put("dies", rows)
            assert await actors.gone() == ()
            os.kill(actor_processes(os.getpid(), classes)[0], signal.SIGKILL)
            with pytest.raises(DataPlaneLost, match=f"{name} of TransferQueue died") as lost:
                await plane.get("dies", ["a", "b"])
            assert lost.value.exit_code == 3
            with pytest.raises(DataPlaneLost, match=name):
                await plane.put("dies", {"c": rows["a"], "d": rows["b"]})

        with running_queue(TransferQueuePlaneConfig(storage=storage)) as actors:
            asyncio.run(use(actors))


@pytest.mark.usefixtures("local_ray")
class TestHanging:
    """In a Ray of its own, which the start that hangs is part of."""

    def test_a_start_that_hangs_ends_at_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another job may take the CPUs between the look and the start."""
        monkeypatch.setattr(queue_service, "missing_for_queue", lambda plane, nodes: ())
        config = TransferQueuePlaneConfig(storage_units=CPUS, deadline_s=8)
        with (
            pytest.raises(DataPlaneError, match=r"within 8 s: it waits for 1 of its 5 CPUs"),
            running_queue(config),
        ):
            pass


@pytest.mark.usefixtures("local_ray")
class TestDyingAtTheStart:
    """In a Ray of its own, for the same reason."""

    def test_a_queue_whose_actor_dies_at_the_start_says_so(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The start would wait for it for ever. It lacks a CPU, so that it cannot be over before
        the actor is killed: its controller is there, and its storage never comes."""
        monkeypatch.setattr(queue_service, "missing_for_queue", lambda plane, nodes: ())

        def kill_when_there() -> None:
            while not (pids := actor_processes(os.getpid(), QUEUE_CONTROLLER)):
                time.sleep(0.005)
            os.kill(pids[0], signal.SIGKILL)

        killing = threading.Thread(target=kill_when_there)
        killing.start()
        config = TransferQueuePlaneConfig(storage_units=CPUS, deadline_s=NEVER_S)
        with (
            pytest.raises(DataPlaneLost, match="Controller of TransferQueue died while it started"),
            running_queue(config),
        ):
            pass
        killing.join()


@pytest.mark.usefixtures("local_ray")
class TestSlow:
    """In a Ray of its own, for the same reason."""

    def test_a_start_that_is_slow_is_not_said_to_lack_cpus(self) -> None:
        with (
            pytest.raises(DataPlaneError, match=r"has the 2 CPUs.*longer data_plane\.deadline_s"),
            running_queue(TransferQueuePlaneConfig(storage_units=1, deadline_s=0.5)),
        ):
            pass
