"""What no worker could work with is refused before a cluster is joined."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.config import CheckpointEngineConfig, ClusterConfig
from rollsync.shell.cli import main
from rollsync.shell.run.check import routes_of
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


def test_a_missing_model_is_found_before_ray_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(
        small_config(tmp_path / "run", tmp_path / "nowhere"),
        cluster=ClusterConfig(address="127.0.0.1:1"),
    )
    assert main(["check-cluster", write_file(config)]) == 2
    assert "model.path: there is no model in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy_workers", "engines", "expected"),
    [
        (1, 3, ((0, 0), (0, 1), (0, 2))),
        (2, 3, ((0, 0), (0, 1), (1, 2))),
        (2, 1, ((0, 0),)),
        (2, 2, ((0, 0), (1, 1))),
    ],
)
def test_the_routes_are_those_of_a_run(
    policy_workers: int, engines: int, expected: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    config = small_config(tmp_path, tmp_path)
    config = replace(
        config,
        grpo=replace(config.grpo, data_parallel_size=policy_workers),
        generation=replace(config.generation, engines=engines),
    )
    assert routes_of(config) == expected
