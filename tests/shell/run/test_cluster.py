"""Runs on a Ray cluster of several nodes: placed where there is room, killed, resumed, refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from msgspec.structs import replace
from ray.cluster_utils import Cluster

from rollsync.pure.config import (
    CheckpointEngineConfig,
    ClusterConfig,
    MasterConfig,
    TransferQueuePlaneConfig,
    WorkerResources,
)
from rollsync.shell.cli import main
from rollsync.shell.cluster import ClusterError, cluster_nodes
from rollsync.shell.refit.engines.staged import HOST_LABEL
from rollsync.shell.run.placement import connected, placed_workers
from tests.shell.run.commands import kill_when, run
from tests.shell.run.runs import (
    all_prompts,
    check_steps_count_on,
    closed_account,
    ended_prompts,
    entries_of,
    small_config,
    write_file,
)
from tests.shell.run.test_transfer_queue import saved_between_two_steps

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head without CPUs, where the controller is, a node for the policy, one for rows and two
    for engines. All are on this machine; the second engine's node is told that it is elsewhere."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1, resources={"trainers": 1})
    cluster.add_node(num_cpus=3, resources={"rows": 1})
    for labels in ({}, {HOST_LABEL: "elsewhere"}):
        cluster.add_node(num_cpus=1, resources={"engines": 1}, env_vars=labels)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def on_cluster(config: MasterConfig, address: str, **changes: object) -> MasterConfig:
    """`config` with two engines, each kind of worker on nodes of its own."""
    cluster = ClusterConfig(
        address=address,
        policy_worker=WorkerResources(custom={"trainers": 1}),
        generation_engine=WorkerResources(custom={"engines": 1}),
        strategy="spread",
        deadline_s=60,
    )
    return replace(
        config,
        cluster=replace(cluster, **changes),
        generation=replace(config.generation, engines=2),
    )


def test_workers_are_placed_on_their_nodes(tmp_path: Path, address: str) -> None:
    config = on_cluster(small_config(tmp_path / "run", tmp_path), address)

    def where() -> str:
        return ray.get_runtime_context().get_node_id()

    with connected(config), placed_workers(config) as placement:
        kinds = {
            node.node_id: kind
            for node in cluster_nodes()
            for kind in ("trainers", "engines", "rows")
            if kind in node.total
        }
        options = [placement.policy_options(0), *(placement.engine_options(i) for i in range(2))]
        task = ray.remote(where)
        nodes = ray.get([task.options(**each).remote() for each in options])
        assert [kinds[node] for node in nodes] == ["trainers", "engines", "engines"]
        assert nodes[1] != nodes[2]
        assert placement.policy_workers_on_host(0) == 3, "the nodes are of one machine"


def test_what_the_cluster_does_not_have_is_named_at_the_deadline(
    tmp_path: Path, address: str
) -> None:
    config = on_cluster(
        small_config(tmp_path / "run", tmp_path),
        address,
        generation_engine=WorkerResources(gpus=8),
        deadline_s=0.5,
    )
    with (
        connected(config),
        pytest.raises(ClusterError, match="no node has 1 CPU, 8 GPU for a generation engine"),
        placed_workers(config),
    ):
        pass


def test_what_another_job_holds_is_named_at_the_deadline(tmp_path: Path, address: str) -> None:
    config = on_cluster(small_config(tmp_path / "run", tmp_path), address, deadline_s=1)
    with (
        connected(config),
        placed_workers(config),
        pytest.raises(ClusterError, match="others hold what there is"),
        placed_workers(config),
    ):
        pass


def test_a_cluster_is_checked_with_made_up_weights(
    tmp_path: Path, model_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine is on the policy worker's host, the other elsewhere."""
    config = replace(
        on_cluster(small_config(tmp_path / "run", model_path), address),
        checkpoint_engine=CheckpointEngineConfig(backend="auto"),
    )
    assert main(["check-cluster", write_file(config)]) == 0
    routes = [line for line in capsys.readouterr().out.splitlines() if "GB/s" in line]
    assert len(routes) == 3, "one for each engine, one for both"
    assert "to generation engine 1" in routes[1]
    assert sorted(
        way for line in routes[:2] for way in ("shm", "nixl") if f"by {way}:" in line
    ) == [
        "nixl",
        "shm",
    ]
    assert routes[2].startswith("all routes together by nixl (1) and shm (1):")
    assert not Path(config.run.directory).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_over_several_nodes_is_killed_and_resumed(
    tmp_path: Path, model_path: Path, address: str
) -> None:
    """The controller, the policy, the rows and each engine are on nodes of their own, and the
    weights go to one engine over shared memory, to the other over NIXL."""
    config = replace(
        on_cluster(small_config(tmp_path / "run", model_path), address),
        data_plane=TransferQueuePlaneConfig(node_resource="rows"),
        checkpoint_engine=CheckpointEngineConfig(backend="auto"),
    )
    kill_when(config, saved_between_two_steps)
    code, said = run(config)
    assert code == 0, said
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts()
    check_steps_count_on(entries_of(config))
