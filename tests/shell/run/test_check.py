"""What no worker could work with is refused before a cluster is joined."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.config import CheckpointEngineConfig, ClusterConfig
from rollsync.pure.refit import plan_routes
from rollsync.pure.refit.routes import RoutingTable, Sites
from rollsync.shell.cli import main
from rollsync.shell.run.check import Way, ways_of
from tests.shell.run.runs import small_config, write_file


@pytest.mark.parametrize("command", ["check-cluster", "run"])
def test_wrong_engine_options_are_found_before_ray_is(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(
        small_config(tmp_path / "run", tmp_path),
        checkpoint_engine=CheckpointEngineConfig(engine_kwargs={"shm": {"chekcsum": True}}),
        cluster=ClusterConfig(address="127.0.0.1:1"),
    )
    assert main([command, write_file(config)]) == 2
    assert "chekcsum" in capsys.readouterr().err
    assert not Path(config.run.directory).exists()


def test_what_a_run_will_not_do_is_said_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run", tmp_path / "nowhere")
    config = replace(config, grpo=replace(config.grpo, max_steps=100))
    assert main(["run", write_file(config)]) == 2
    assert "note: grpo.max_steps: 100 steps need 200 prompts" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check-cluster", "run"])
def test_a_missing_model_is_found_before_ray_is(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(
        small_config(tmp_path / "run", tmp_path / "nowhere"),
        cluster=ClusterConfig(address="127.0.0.1:1"),
    )
    assert main([command, write_file(config)]) == 2
    assert f"model.path: {tmp_path / 'nowhere'}: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy_workers", "engines", "expected"),
    [
        (1, 3, [Way(0, (0,)), Way(0, (1,)), Way(0, (2,))]),
        (2, 3, [Way(0, (0,)), Way(0, (1,)), Way(1, (2,))]),
        (2, 1, [Way(0, (0,))]),
        (2, 2, [Way(0, (0,)), Way(1, (1,))]),
    ],
)
def test_without_relays_a_way_is_a_route(
    policy_workers: int, engines: int, expected: list[Way]
) -> None:
    assert list(ways_of(plan_routes(policy_workers, engines).unwrap())) == expected


def test_a_relayed_way_names_its_relays_in_their_order() -> None:
    assert ways_of(relayed(("p",), ("p", "a", "a", "b", "b"))) == (
        Way(0, (0,)),
        Way(0, (1,)),
        Way(0, (1, 2)),
        Way(0, (1, 3)),
        Way(0, (1, 3, 4)),
    )


@pytest.mark.parametrize("policy_hosts", [("p",), ("p", "p"), ("p", "a")])
def test_the_workers_of_a_way_by_themselves_have_the_same_routes(
    policy_hosts: tuple[str, ...],
) -> None:
    for engine_hosts in product("pabc", repeat=5):
        for way in ways_of(relayed(policy_hosts, engine_hosts)):
            host = policy_hosts[way.policy_worker]
            alone = relayed((host,), tuple(engine_hosts[index] for index in way.engines))
            assert ways_of(alone)[-1] == Way(0, tuple(range(len(way.engines))))


def relayed(policy_hosts: tuple[str, ...], engine_hosts: tuple[str, ...]) -> RoutingTable:
    """The routes between workers on these hosts, with relays."""
    sites = Sites(policy_hosts=policy_hosts, rollout_hosts=engine_hosts)
    return plan_routes(len(policy_hosts), len(engine_hosts), sites).unwrap()
