"""Runs on a Ray cluster of several nodes: placed where there is room, killed, resumed, refused."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
from rollsync.pure.refit.fleet.state import EnginePhase
from rollsync.pure.refit.routes import NOTHING_TO_RELAY
from rollsync.shell.cli import main
from rollsync.shell.cluster import ClusterError, cluster_nodes
from rollsync.shell.journal import EngineChanged, JournalEntry, StepTrained
from rollsync.shell.refit.engines.metadata import HOST_LABEL
from rollsync.shell.rollout.clients import TrainerLost
from rollsync.shell.run.launch import run_config
from rollsync.shell.run.placement import connected, placed_workers
from tests.shell.run.commands import kill_when, run
from tests.shell.run.fleet_runs import endless_config
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
def nodes() -> Iterator[Cluster]:
    """A head without CPUs, where the controller is; two nodes with a place for a policy worker and
    one for an engine, one with a place for an engine, one for rows. All are on this machine, and
    those with workers are told that they are hosts of their own."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=3, resources={"rows": 1})
    for name, places in (
        ("first", {"trainers": 1, "engines": 1}),
        ("second", {"trainers": 1, "engines": 1}),
        ("third", {"engines": 1}),
    ):
        cluster.add_node(num_cpus=2, resources=places, env_vars={HOST_LABEL: name})
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def address(nodes: Cluster) -> str:
    """Where the cluster is."""
    found: str = nodes.address
    return found


def on_cluster(config: MasterConfig, address: str, **changes: object) -> MasterConfig:
    """`config` with two policy workers and three engines."""
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
        grpo=replace(config.grpo, data_parallel_size=2),
        generation=replace(config.generation, engines=3),
        checkpoint_engine=CheckpointEngineConfig(backend="auto"),
    )


WAYS = (
    # The first worker feeds two engines, of which one is with it.
    ("policy worker 0", "generation engine 0", "shm"),
    ("policy worker 0", "generation engine 1", "nixl"),
    ("policy worker 1", "generation engine 2", "shm"),
)
"""Each route of a run, and what carries it."""


def check_places(policy: Sequence[str], engines: Sequence[str]) -> None:
    """Every worker is on the node that `WAYS` needs it on.

    Args:
        policy: the node id of each policy worker.
        engines: the node id of each engine.
    """
    trainers = {node.node_id for node in cluster_nodes() if "trainers" in node.total}
    assert set(policy) == trainers
    assert len(trainers) == 2
    assert (engines[0], engines[2]) == tuple(policy)
    (other,) = {node.node_id for node in cluster_nodes() if "engines" in node.total} - trainers
    assert engines[1] == other


def test_workers_are_placed_on_their_nodes(tmp_path: Path, address: str) -> None:
    config = on_cluster(small_config(tmp_path / "run", tmp_path), address)

    def where() -> str:
        return ray.get_runtime_context().get_node_id()

    with connected(config), placed_workers(config) as placement:
        policy = [placement.policy_options(rank) for rank in range(2)]
        engines = [placement.engine_options(index) for index in range(3)]
        task = ray.remote(where)
        nodes = ray.get([task.options(**each).remote() for each in (*policy, *engines)])
        check_places(nodes[:2], nodes[2:])
        told = [placement.policy_node(0), placement.policy_node(1)]
        told += [placement.engine_node(index) for index in range(3)]
        assert [node.node_id for node in told] == nodes
        on_host = [placement.policy_workers_on_host(rank) for rank in range(2)]
        on_host += [placement.engine_workers_on_host(index) for index in range(3)]
        assert on_host == [5] * 5, "the nodes are of one machine"


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
    config = on_cluster(small_config(tmp_path / "run", model_path), address)
    # No policy worker has two engines on other hosts.
    relays = CheckpointEngineConfig(backend="auto", engine_kwargs={"auto": {"relay": True}})
    assert main(["check-cluster", write_file(replace(config, checkpoint_engine=relays))]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert NOTHING_TO_RELAY in printed
    lines = [line for line in printed if "GB/s" in line]
    assert len(lines) == len(WAYS) + 2
    for line, (sender, receiver, carrier) in zip(lines, WAYS, strict=False):
        assert line.startswith(f"{sender} (node ")
        assert f" to {receiver} (node " in line
        assert f") by {carrier}: " in line
    assert lines[-2].startswith("all routes together by nixl (1) and shm (2):")
    assert lines[-1].startswith("gradients of 2 policy workers, added up by gloo:")
    assert not Path(config.run.directory).exists()


@pytest.mark.slow
def test_a_cluster_whose_engines_relay_is_checked_along_the_chain(
    tmp_path: Path, model_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on_cluster(small_config(tmp_path / "run", model_path), address)
    config = replace(
        config,
        grpo=replace(config.grpo, data_parallel_size=1),
        checkpoint_engine=CheckpointEngineConfig(
            backend="auto", engine_kwargs={"auto": {"relay": True}}
        ),
    )
    assert main(["check-cluster", write_file(config)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "GB/s" in line]
    beside, first, last, together = lines
    assert " to generation engine 0 (" in beside
    assert ") by shm: " in beside
    assert " to generation engine 1 (" in first
    assert ") by nixl: " in first
    assert " to generation engine 2 (" in last
    assert "), relayed by generation engine 1 by nixl: " in last
    assert together.startswith("all routes together by nixl (2) and shm (1): ")
    # What comes to an engine is the model, however many loaded it on the way.
    carried = [re.findall(r": ([0-9.]+) MB in ", line) for line in (beside, first, last)]
    assert carried[0] == carried[1] == carried[2]


@pytest.mark.timeout(300)
def test_a_run_has_its_workers_on_nodes_of_their_own(
    tmp_path: Path, model_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = on_cluster(small_config(tmp_path / "run", model_path), address)
    config = replace(config, grpo=replace(config.grpo, max_steps=2))
    engine_pids: dict[str, int] = {}
    seen: list[Sequence[ActorPlace]] = []

    def look(entry: JournalEntry) -> None:
        if isinstance(entry, EngineChanged) and entry.pid is not None:
            engine_pids[entry.engine] = entry.pid
        if isinstance(entry, StepTrained):
            seen.append(places_of_actors())

    with caplog.at_level(logging.INFO, logger="rollsync.shell.refit.synchronizer"):
        outcome = run_config(config, listener=look)
    assert outcome.completed
    closed_account(config)
    assert explained_ways(caplog) == list(WAYS)
    assert len(seen) == 2
    with connected(config):
        nodes = {node.node_id: node.total for node in cluster_nodes()}
    for actors in seen:
        node_of = {actor.pid: actor.node_id for actor in actors}
        policy = [actor.node_id for actor in actors if actor.kind == "GrpoPolicyWorker"]
        engines = [node_of[engine_pids[f"engine-{index}"]] for index in range(3)]
        # Shared memory is the proof of which policy worker is with which engine.
        assert sorted(policy) == sorted([engines[0], engines[2]])
        assert len({*policy, *engines}) == 3
        assert all("trainers" in nodes[node] for node in policy)
        assert "trainers" not in nodes[engines[1]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replacement_is_fed_the_way_that_its_forerunner_was(
    tmp_path: Path, model_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = on_cluster(endless_config(tmp_path / "run", model_path, engines=3), address)

    def kill_one_and_stop(entry: JournalEntry) -> None:
        if isinstance(entry, EngineChanged) and entry.now == EnginePhase.HEALTHY:
            assert entry.pid is not None
            if entry.engine == "engine-0":
                os.kill(entry.pid, signal.SIGKILL)
            elif entry.engine == "engine-3":
                os.kill(os.getpid(), signal.SIGTERM)

    with caplog.at_level(logging.INFO, logger="rollsync.shell.refit.synchronizer"):
        outcome = run_config(config, listener=kill_one_and_stop)
    assert not outcome.completed
    assert outcome.why.startswith("asked to stop")
    assert explained_ways(caplog)[-len(WAYS) :] == list(WAYS)
    closed_account(config)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_of_a_node_is_the_loss_of_its_policy_worker(
    tmp_path: Path, model_path: Path, nodes: Cluster, address: str
) -> None:
    doomed = [nodes.add_node(num_cpus=1, resources={"doomed": 1}) for _ in range(2)]
    nodes.wait_for_nodes()
    usual = on_cluster(small_config(tmp_path / "run", model_path), address)
    config = on_cluster(
        small_config(tmp_path / "run", model_path),
        address,
        policy_worker=WorkerResources(custom={"doomed": 1}),
    )

    def lose_a_node(entry: JournalEntry) -> None:
        if isinstance(entry, StepTrained) and entry.step == 2:
            nodes.remove_node(doomed.pop(), allow_graceful=False)

    with pytest.raises(TrainerLost, match=r"policy worker [01] is gone: "):
        run_config(config, listener=lose_a_node)
    nodes.remove_node(doomed.pop())
    assert run_config(usual).completed
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts()


def explained_ways(log: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """What the synchronizer said about each route, in the form of `WAYS`."""
    said = (re.match(r"policy (\d) to rollout (\d) by (\w+): ", text) for text in log.messages)
    return [
        (f"policy worker {way[1]}", f"generation engine {way[2]}", way[3]) for way in said if way
    ]


class ActorPlace(NamedTuple):
    """An actor that lives."""

    kind: str
    pid: int
    node_id: str


def places_of_actors() -> list[ActorPlace]:
    """Where the run's actors are, as the cluster says."""
    return [
        ActorPlace(each["ActorClassName"], each["Pid"], each["Address"]["NodeID"])
        for each in ray._private.state.actors().values()
        if each["State"] == "ALIVE"
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_over_several_nodes_is_killed_and_resumed(
    tmp_path: Path, model_path: Path, address: str
) -> None:
    """The controller, the policy workers, the rows and each engine are on nodes of their own, and
    the weights go to some engines over shared memory, to others over NIXL."""
    config = replace(
        on_cluster(small_config(tmp_path / "run", model_path), address),
        data_plane=TransferQueuePlaneConfig(node_resource="rows"),
    )
    kill_when(config, saved_between_two_steps)
    code, said = run(config)
    assert code == 0, said
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts()
    check_steps_count_on(entries_of(config))
