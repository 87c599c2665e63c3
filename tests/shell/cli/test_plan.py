"""`rollsync plan` on a configuration, on safetensors files, and on what it cannot plan."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch

from rollsync.shell.cli import main
from tests.pure.refit.published_models import (
    LLAMA_3_1_70B,
    QWEN2_5_0_5B,
    QWEN3_235B_A22B,
    PublishedModel,
)


def write_config(directory: Path, model: PublishedModel) -> Path:
    path = directory / "config.json"
    path.write_bytes(msgspec.json.encode(model.config))
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["plan", "--json", *arguments]) == 0
    document: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def routes_of(document: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    routes = document["estimate"]["routes"]
    assert isinstance(routes, list)
    return routes


def test_a_dense_model_is_shared_out_evenly_over_nixl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, LLAMA_3_1_70B))
    document = planned(capsys, config, "--train-world", "4", "--rollout-world", "16", "--tp", "8")
    estimate = document["estimate"]
    assert estimate["parameters_bytes"] == 2 * LLAMA_3_1_70B.parameters
    assert estimate["tensors"] == 723
    assert estimate["bucket_bytes"] == 819 << 20
    routes = routes_of(document)
    assert [route["rollout_rank"] for route in routes] == list(range(16))
    assert [route["policy_rank"] for route in routes] == [r // 4 for r in range(16)]
    assert {route["engine"] for route in routes} == {"nixl"}
    assert document["options"]["tensor_parallel"] == 8


def test_a_rank_of_a_mixture_of_experts_is_sent_its_own_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, QWEN3_235B_A22B))
    document = planned(
        capsys, config, "--train-world", "32", "--rollout-world", "16", "--tp", "4", "--ep", "16"
    )
    assert document["estimate"]["parameters_bytes"] == 2 * QWEN3_235B_A22B.parameters
    assert document["estimate"]["idle_policy_ranks"] == list(range(16, 32))
    tensors = {route["tensors"] for route in routes_of(document)}
    assert tensors == {36945 - 94 * 120 * 3}
    # A rank's rows of the embedding and of the output are large, and come in five parts each.
    assert {route["parts"] for route in routes_of(document)} == {36945 - 94 * 120 * 3 + 2 * 4}


def test_fused_experts_are_fewer_tensors_and_as_many_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, QWEN3_235B_A22B))
    worlds = ("--rollout-world", "16", "--tp", "4", "--ep", "16")
    single = planned(capsys, config, *worlds)
    fused = planned(capsys, config, *worlds, "--fused-experts")
    assert fused["options"]["fused_experts"] is True
    assert fused["estimate"]["parameters_bytes"] == single["estimate"]["parameters_bytes"]
    assert fused["estimate"]["tensors"] == 36945 - 94 * (128 * 3 - 2)
    payloads = [
        [route["payload_bytes"] for route in routes_of(document)] for document in (single, fused)
    ]
    assert payloads[0] == payloads[1]


def test_relays_are_planned_when_hosts_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, QWEN2_5_0_5B))
    arguments = (config, "--rollout-world", "4", "--workers-per-host", "2")
    routes = routes_of(planned(capsys, *arguments))
    assert [(r["sender"], r["sender_rank"], r["engine"]) for r in routes] == [
        ("policy", 0, "nixl"),
        ("rollout", 0, "shm"),
        ("rollout", 0, "nixl"),
        ("rollout", 2, "shm"),
    ]
    shared = routes_of(planned(capsys, *arguments, "--shared-hosts"))
    assert [(r["sender"], r["engine"]) for r in shared] == [
        ("policy", "shm"),
        ("policy", "shm"),
        ("policy", "nixl"),
        ("rollout", "shm"),
    ]


def test_a_rank_is_sent_slices_unless_whole_tensors_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, QWEN2_5_0_5B))
    sliced = routes_of(planned(capsys, config, "--tp", "2"))
    whole = routes_of(planned(capsys, config, "--tp", "2", "--whole"))
    assert len(sliced) == len(whole) == 2
    assert {route["payload_bytes"] for route in whole} == {2 * QWEN2_5_0_5B.parameters}
    for route in sliced:
        assert isinstance(route["payload_bytes"], int)
        assert route["payload_bytes"] < 1.01 * QWEN2_5_0_5B.parameters


def test_the_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, LLAMA_3_1_70B))
    assert main(["plan", config, "--tp", "8", "--ratio", "0.1", "--link-gb-per-s", "25"]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert "131.42 GiB in 723 tensors" in lines["weights"]
    assert "model.embed_tokens.weight, 1.96 GiB, 0.24 buckets" in lines["largest tensor"]
    assert "8.00 GiB (0.1 of 80 GiB)" in lines["bucket"]
    assert "16.00 GiB a worker that sends, or reads" in lines["memory reserved"]
    assert "144.00 GiB in all" in lines["memory reserved"]
    assert "at most 131.43 GiB by one worker" in lines["sent"]
    assert "8 rollout (tensor-parallel 8)" in lines["workers"]
    # One worker sends the whole model, 141.1 GB at 25 GB/s, in eight streams.
    assert "5.65 s" in lines["time of the links"]
    row = ["0-7", "policy", "0", "policy", "0", "nixl", "723", "729", "16.43", "GiB", "0", "B"]
    assert lines["0-7"].split()[:14] == [*row, "1.00", "GiB"]
    assert "A policy worker divides its buckets among the different layouts" in out
    assert "A first sync" in out


def test_a_row_for_all_neighbours_that_are_sent_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, QWEN2_5_0_5B))
    assert main(["plan", config, "--rollout-world", "6", "--workers-per-host", "2"]) == 0
    rows = [line.split()[:6] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row[1:2] in (["policy"], ["rollout"])] == [
        ["0", "policy", "0", "policy", "0", "nixl"],
        ["1", "rollout", "0", "policy", "0", "shm"],
        ["2", "rollout", "0", "policy", "0", "nixl"],
        ["3", "rollout", "2", "policy", "0", "shm"],
        ["4", "rollout", "2", "policy", "0", "nixl"],
        ["5", "rollout", "4", "policy", "0", "shm"],
    ]


def test_long_tables_are_cut_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, QWEN2_5_0_5B))
    assert main(["plan", config, "--rollout-world", "66", "--workers-per-host", "2"]) == 0
    assert "... and 2 more rows; --json prints all routes" in capsys.readouterr().out


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory as publishers fill it: two files, an index, a configuration."""
    parts = [
        {
            "model.embed_tokens.weight": torch.zeros(64, 8, dtype=torch.bfloat16),
            "model.layers.0.self_attn.k_proj.weight": torch.zeros(8, 8, dtype=torch.bfloat16),
        },
        {
            "model.layers.0.mlp.down_proj.weight": torch.zeros(8, 16, dtype=torch.bfloat16),
            "model.norm.weight": torch.zeros(8, dtype=torch.float32),
        },
    ]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts):
        name = f"model-{number}.safetensors"
        safetensors.torch.save_file(part, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1568}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = msgspec.structs.replace(QWEN2_5_0_5B.config, num_key_value_heads=1)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    return tmp_path


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_directory_and_its_index(
    saved: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = planned(capsys, str(saved / name))["estimate"]
    assert (estimate["parameters_bytes"], estimate["tensors"]) == (1024 + 128 + 256 + 32, 4)


def test_the_configuration_beside_the_files_counts(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One key head for two ranks: each keeps it whole. Tied output: each stage has its name.
    sliced = routes_of(planned(capsys, str(saved), "--tp", "2"))
    assert [route["payload_bytes"] for route in sliced] == [512 + 128 + 128 + 32] * 2
    assert [route["tensors"] for route in sliced] == [4, 4]
    (saved / "config.json").unlink()
    guessed = routes_of(planned(capsys, str(saved), "--tp", "2"))
    assert [route["payload_bytes"] for route in guessed] == [512 + 64 + 128 + 32] * 2


def test_one_file_alone_and_files_without_an_index(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = planned(capsys, str(saved / "model-1.safetensors"))
    assert one["estimate"]["parameters_bytes"] == 256 + 32
    (saved / "model.safetensors.index.json").unlink()
    assert planned(capsys, str(saved))["estimate"]["tensors"] == 4


def test_names_are_shown_as_they_are_and_controls_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "m[/x]:smile:\x1b[31m"
    directory.mkdir(parents=True)
    weights = {"w[red]x[/y]\x1b[2J\x9bm": torch.zeros(4)}
    safetensors.torch.save_file(weights, directory / "model.safetensors")
    assert main(["plan", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "w[red]x[/y]\\x1b[2J\\x9bm, 16 B" in out
    assert "m[/x]:smile:\\x1b[31m" in "".join(out.split())
    assert main(["plan", str(directory), "--json"]) == 0
    out += capsys.readouterr().out
    assert "\\u009bm" in out
    assert "No such" in refused(capsys, str(directory / "none"))
    (directory / "model.safetensors").write_bytes(b"")
    assert "\\x1b[31m" in refused(capsys, str(directory))
    assert out.replace("\n", "").isprintable()


def test_what_cannot_be_read_is_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "model-1.safetensors").write_bytes(b"\0" * 20)
    assert "model-1.safetensors" in refused(capsys, str(saved))
    (saved / "model-1.safetensors").write_bytes((40).to_bytes(8, "little") + b"{" * 40)
    assert "not a usable safetensors header" in refused(capsys, str(saved))
    (saved / "model-1.safetensors").write_bytes((40).to_bytes(8, "little") + b"{}")
    assert "the file ends after 2" in refused(capsys, str(saved))
    (saved / "model-1.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert "names no tensor" in refused(capsys, str(saved / "model-1.safetensors"))
    (saved / "model-1.safetensors").unlink()
    assert "model-1.safetensors: No such file" in refused(capsys, str(saved))
    (saved / "model.safetensors.index.json").write_text("[]")
    assert "index.json" in refused(capsys, str(saved / "model.safetensors.index.json"))
    (saved / "config.json").write_text("{}")
    assert "model_type" in refused(capsys, str(saved / "config.json"))
    (saved / "empty").mkdir()
    assert "neither safetensors files nor a config.json" in refused(capsys, str(saved / "empty"))
    assert "No such file" in refused(capsys, str(saved / "nothing.json"))


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (["--ratio", "1.5"], "update_weights_bucket_memory_ratio"),
        (["--memory-gib", "0.001"], "less than one MiB"),
        (["--rollout-world", "3", "--tp", "2"], "do not divide"),
        (["--tp", "3"], "14 attention heads, and 2 of keys and values"),
        (["--tp", "4"], "change --tp\n"),
        (["--ep", "2"], "the model has no experts to share: leave it at 1"),
        (["--pp", "25"], "pipeline stages"),
        (["--tp", "2", "--ep", "3"], "change --ep, --tp and --rollout-world"),
        (["--tp", "2", "--ep", "4", "--rollout-world", "2"], "2 rollout workers of a pipeline"),
        (["--rollout-world", "1000000"], "more than the 10,000 that a plan is made for"),
        (["--train-world", "100000000"], "change --train-world"),
        (["--tp", "100000", "--pp", "100000"], "10,000,000,000 rollout workers"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    mentioned: str,
) -> None:
    assert mentioned in refused(capsys, str(write_config(tmp_path, QWEN2_5_0_5B)), *arguments)


def test_an_unknown_model_type_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = msgspec.structs.replace(QWEN2_5_0_5B.config, model_type="mamba")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    assert "'mamba'" in refused(capsys, str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [["--tp", "0"], ["--tp", "x"], ["--pp", "1e3"], ["--ep", "9" * 5000], ["--train-world", "-1"]]
    + [["--memory-gib", memory] for memory in ("-1", "0", "nan", "inf", "1e303", "x")]
    + [["--link-gb-per-s", speed] for speed in ("inf", "nan", "0", "1e-320", "1e308")]
    + [["--host-gb-per-s", "1e-320"]],
)
def test_numbers_that_are_none_are_refused_by_the_parser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    config = str(write_config(tmp_path, QWEN2_5_0_5B))
    with pytest.raises(SystemExit) as exit_:
        main(["plan", config, *arguments])
    assert exit_.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_no_torch_ray_or_vllm_is_imported(tmp_path: Path) -> None:
    config = write_config(tmp_path, QWEN2_5_0_5B)
    program = (
        "import sys; from rollsync.shell.cli import main\n"
        f"assert main(['plan', {str(config)!r}]) == 0\n"
        "print(sorted({'torch', 'ray', 'vllm', 'numpy', 'safetensors'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def write_weights(directory: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """A file with the header of these tensors (dtype and shape), and no bytes behind it."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    data = json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    return str(path)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "mentioned"),
    [
        ("q_proj.weight", "BF16", (2**61, 1), "4,611,686,018,427,387,904 bytes"),
        ("q_proj.weight", "I8", (2**62, 1), "more than the 17,592,186,044,416 that"),
        (f"layers.{'9' * 5000}.q_proj.weight", "I8", (8, 8), "layers are more than the 10,000"),
        ("layers.0.experts.4294967296.w1.weight", "I8", (8, 8), "experts are more than"),
    ],
)
def test_a_file_of_no_model_is_refused_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    mentioned: str,
) -> None:
    source = write_weights(tmp_path, {name: (dtype, shape)})
    assert mentioned in refused(capsys, source, "--tp", "2")
    assert mentioned in refused(capsys, source, "--fused-experts", "--whole")


def test_a_large_tensor_is_planned_in_no_more_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_weights(tmp_path, {"o_proj.weight": ("I8", (2**20, 2**24))})
    (route,) = routes_of(planned(capsys, source, "--memory-gib", "0.1"))
    assert route["payload_bytes"] == 2**44
    assert route["buckets"] == 2**44 // (1 << 20)


def test_query_and_key_weights_that_a_loader_reorders_are_sent_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = "language_model.model.layers.0.self_attn"
    seeing = "vision_model.model.layers.0.self_attn"
    source = write_weights(
        tmp_path,
        {f"{attention}.{each}_proj.weight": ("I8", (16, 8)) for each in "qkv"}
        | {f"{seeing}.{each}_proj.weight": ("I8", (16, 8)) for each in "qkv"},
    )
    inner = msgspec.to_builtins(LLAMA_3_1_70B.config) | {"model_type": "llama4_text"}
    outer = {"model_type": "llama4", "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    bytes_of = {route["payload_bytes"] for route in routes_of(planned(capsys, source, "--tp", "4"))}
    assert bytes_of == {2 * 128 + 128 // 4 + 3 * 128 // 4}


def test_what_is_no_file_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "no regular file" in refused(capsys, str(tmp_path / "config.json"))
    os.mkfifo(tmp_path / "x.safetensors")
    assert "no regular file" in refused(capsys, str(tmp_path / "x.safetensors"))
    assert "no regular file" in refused(capsys, "/dev/zero")
