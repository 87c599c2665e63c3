"""What is missing of a model is named by the setting that names the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollsync.shell.config import ConfigError
from rollsync.shell.run.model_directory import check_model_directory

INDEX = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'


def written(directory: Path, files: dict[str, str]) -> str:
    """`directory` with these files, by name."""
    for name, text in files.items():
        (directory / name).write_text(text)
    return str(directory)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model.safetensors": ""}, r"no config\.json in"),
        ({"config.json": "{}", "tokenizer.json": "{}"}, r"no weights in .*: no \*\.safetensors"),
        (
            {
                "config.json": "{}",
                "model.safetensors.index.json": INDEX,
                "one.safetensors": "",
            },
            r"not there: two\.safetensors",
        ),
        ({"config.json": "{}", "model.safetensors.index.json": "{"}, "index.json: "),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path: .*{words}") as caught:
        check_model_directory(written(tmp_path, files))
    assert caught.value.paths == ("model.path",)


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    written(tmp_path, {"config.json": "{}"})
    for path in (tmp_path / "nowhere", tmp_path / "config.json"):
        with pytest.raises(ConfigError, match=rf"model\.path: {path}: "):
            check_model_directory(str(path))


@pytest.mark.parametrize(
    "weights",
    [
        {"model.safetensors": ""},
        {"pytorch_model.bin": ""},
        {"model.safetensors.index.json": INDEX, "one.safetensors": "", "two.safetensors": ""},
    ],
)
def test_a_model_that_is_there_is_taken(tmp_path: Path, weights: dict[str, str]) -> None:
    check_model_directory(written(tmp_path, {"config.json": "{}", **weights}))
