"""A configuration is read whole or refused with the path of what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from msgspec import inspect

from rollsync.pure.config import MasterConfig, TransferQueuePlaneConfig, doubtful
from rollsync.pure.rollout.sampler import InOrderSampler
from rollsync.shell.config import ConfigError, at_address, parse_config, read_config

Settings = dict[str, dict[str, object]]


def settings() -> Settings:
    return {
        "run": {"directory": "runs/here"},
        "data": {"task": "chain_sum", "size": 64},
        "model": {"path": "model"},
        "grpo": {
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 4,
            "max_steps": 5,
            "learning_rate": 1e-3,
        },
        "generation": {"backend": "torch", "max_new_tokens": 8},
        "sampler": {"name": "in_order", "max_lookahead_versions": 0},
    }


def parse(value: object) -> None:
    parse_config(yaml.safe_dump(value).encode(), source="run.yaml")


def structs(of: inspect.Type) -> Iterator[inspect.StructType]:
    if isinstance(of, inspect.StructType):
        yield of
        for field in of.fields:
            yield from structs(field.type)
    elif isinstance(of, inspect.UnionType):
        for member in of.types:
            yield from structs(member)


def test_no_section_takes_a_key_that_it_does_not_know() -> None:
    taking = [
        each.cls.__name__
        for each in structs(inspect.type_info(MasterConfig))
        if not each.forbid_unknown_fields
    ]
    assert not taking


def test_a_file_becomes_a_typed_value(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings()))
    config = read_config(file)
    assert config.grpo.num_prompts_per_step == 8
    assert config.sampler == InOrderSampler(max_lookahead_versions=0)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("grpo", "num_prompt_per_step", 8),
        ("grpo", "max_steps", "five"),
        ("grpo", "max_steps", 0),
        ("grpo", "max_steps", 10**30),
        ("grpo", "learning_rate", float("inf")),
        ("grpo", "learning_rate", float("nan")),
        ("run", "directory", ""),
        ("sampler", "max_lookahead_versions", -1),
        ("sampler", "max_lookahead", 1),
        ("grpo", "num_generations_per_prompt", 1),
        ("grpo", "data_parallel_size", 0),
        ("grpo", "data_parallel_size", 9),
        ("generation", "backend", "sglang"),
        ("data", "size", 4),
        ("generation", "fleet", {"min_healthy": 2}),
        ("generation", "fleet", {"suspect_after": 3, "dead_after": 2}),
        ("generation", "fleet", {"probes": 2}),
        ("generation", "max_new_tokens", 128),
    ],
)
def test_what_is_wrong_is_named(section: str, key: str, value: object) -> None:
    wrong = settings()
    wrong[section][key] = value
    with pytest.raises(ConfigError) as refused:
        parse(wrong)
    assert section in str(refused.value)
    assert refused.value.paths
    assert all(path.startswith(section) for path in refused.value.paths)


@pytest.mark.parametrize("ratio", [1.0, 0.0, 1e-320, -0.5])
def test_a_bucket_ratio_outside_its_range_is_refused(ratio: float) -> None:
    wrong = settings() | {"checkpoint_engine": {"update_weights_bucket_memory_ratio": ratio}}
    with pytest.raises(ConfigError, match="checkpoint_engine"):
        parse(wrong)


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, "60", True])
@pytest.mark.parametrize("backend", ["shm", "nixl", "a_plug_in:Engine"])
def test_a_deadline_that_is_no_number_of_seconds_is_refused_by_its_path(
    backend: str, timeout_s: object
) -> None:
    wrong = {"engine_kwargs": {backend: {"refit_timeout_s": timeout_s}}}
    with pytest.raises(ConfigError, match="give a positive number of seconds") as refused:
        parse(settings() | {"checkpoint_engine": wrong})
    path = f"checkpoint_engine.engine_kwargs.{backend}.refit_timeout_s"
    assert refused.value.paths == (path,)
    assert path in str(refused.value)


def test_a_clusters_address_is_where_a_controller_can_be() -> None:
    for address in ("auto", "10.0.0.1:6379"):
        parse(settings() | {"cluster": {"address": address}})
    with pytest.raises(ConfigError, match=r"cluster\.address.*on a node of the cluster"):
        parse(settings() | {"cluster": {"address": "ray://head:10001"}})
    moved = settings()
    moved["run"]["address"] = None
    parse(moved)
    moved["run"]["address"] = "auto"
    with pytest.raises(ConfigError, match=r"run\.address.*cluster\.address"):
        parse(moved)


def test_a_command_line_can_name_the_cluster() -> None:
    config = parse_config(yaml.safe_dump(settings()).encode(), source="run.yaml")
    assert at_address(config, None) is config
    assert at_address(config, "head:6379").cluster.address == "head:6379"
    with pytest.raises(ConfigError, match="--address ray://head:1"):
        at_address(config, "ray://head:1")


def test_a_data_plane_is_named_by_its_backend() -> None:
    queue = {"backend": "transfer_queue", "storage": "ray", "deadline_s": 5}
    config = parse_config(
        yaml.safe_dump(settings() | {"data_plane": queue}).encode(), source="run.yaml"
    )
    assert config.data_plane == TransferQueuePlaneConfig(storage="ray", deadline_s=5)
    for wrong in ({"backend": "redis"}, {"backend": "in_process", "storage": "ray"}):
        with pytest.raises(ConfigError, match="data_plane"):
            parse(settings() | {"data_plane": wrong})


def test_a_deterministic_run_needs_a_sampler_that_time_cannot_change() -> None:
    wrong = settings()
    wrong["run"]["deterministic"] = True
    parse(wrong)
    wrong["sampler"]["max_lookahead_versions"] = 1
    with pytest.raises(ConfigError, match=r"sampler\.max_lookahead_versions"):
        parse(wrong)
    wrong["sampler"] = {"name": "windowed"}
    with pytest.raises(ConfigError, match=r"run\.deterministic"):
        parse(wrong)


def test_a_buffer_that_would_stop_the_sampler_is_refused() -> None:
    wrong: dict[str, object] = settings() | {"buffer_capacity": 7}
    with pytest.raises(ConfigError, match="needs room for 8 groups"):
        parse(wrong)


def test_a_missing_file_and_broken_yaml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml is not YAML: line 1, column") as refused:
        parse_config(b"run: [", source="run.yaml")
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="not YAML") as refused:
        parse_config(b"run: \x00", source="run.yaml")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        "!!timestamp x",
        "2001-99-99",
        "2001-01-01",
        "!!int x",
        "!!bool maybe",
        "!!float x",
        "!!binary x",
        "!!python/name:os.system",
        "1" * 5000,
    ],
)
def test_a_value_that_yaml_cannot_read_is_named_by_its_path(value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: run\.seed: .*line 2") as refused:
        parse_config(f"run:\n  seed: {value}\n".encode(), source="run.yaml")
    assert refused.value.paths == ("run.seed",)
    assert "NoneType" not in str(refused.value)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed: given twice, again in line 3") as refused:
        parse_config(b"run:\n  seed: 1\n  seed: 2\n", source="run.yaml")
    assert refused.value.paths == ("run.seed",)


def test_an_alias_that_leads_to_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.directory"):
        parse_config(b"run: &run\n  directory: *run\n", source="run.yaml")


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="not YAML"):
        parse_config(b"run: " + b"[" * 5000, source="run.yaml")


def test_what_a_run_will_not_do_as_it_was_meant_is_doubted() -> None:
    def doubts(value: object) -> dict[str, str]:
        config = parse_config(yaml.safe_dump(value).encode(), source="run.yaml")
        return {each.path: each.reason for each in doubtful(config)}

    assert doubts(settings()) == {}
    longer = settings()
    longer["grpo"]["max_steps"] = 9
    assert "the run ends after 8 steps" in doubts(longer)["grpo.max_steps"]
    longer["data"]["size"] = 65
    assert doubts(longer) == {}
    longer["grpo"]["max_steps"] = 16
    longer["data"] |= {"size": 64, "max_epochs": 2}
    assert doubts(longer) == {}
    kwargs = {"shm": {"direct": True}, "nixl": {}, "auto": {"relay": True}}
    engine = {"checkpoint_engine": {"backend": "auto", "engine_kwargs": kwargs}}
    assert list(doubts(settings() | engine)) == ["checkpoint_engine.engine_kwargs.shm"]


def test_an_option_beside_its_engine_is_sent_under_the_engines_name() -> None:
    wrong = settings() | {"checkpoint_engine": {"engine_kwargs": {"direct": True}}}
    with pytest.raises(ConfigError, match=r"engine_kwargs.*bool.*under its name, as in \{shm:"):
        parse(wrong)
