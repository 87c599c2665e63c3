"""Whether a directory has what trainer and engines read of a model, before any of them is started.

Rule kept here: names are looked at, and the index of the weights is read; no weight is.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from returns.pipeline import is_successful

from rollsync.codecs.refit import huggingface
from rollsync.shell.config import ConfigError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.bin")


def check_model_directory(path: str) -> None:
    """Refuse a directory from which no model can be read. Its tokenizer is `PolicyTokenizer`'s.

    Raises:
        ConfigError: the directory, its config.json or its weights are not there.
    """
    directory = Path(path)
    try:
        names = {each.name for each in directory.iterdir()}
    except OSError as error:
        _refuse(f"{path}: {error.strerror}")
    if CONFIG not in names:
        _refuse(f"there is no {CONFIG} in {path}")
    if INDEX in names:
        missing = [each for each in _indexed(directory / INDEX) if each not in names]
        if missing:
            _refuse(f"{INDEX} in {path} lists files that are not there: {', '.join(missing)}")
    elif not any(any(directory.glob(pattern)) for pattern in WEIGHTS):
        _refuse(f"there are no weights in {path}: no {' and no '.join(WEIGHTS)}")


def _indexed(index: Path) -> tuple[str, ...]:
    try:
        listed = huggingface.read_index(index.read_bytes())
    except OSError as error:
        _refuse(f"{index}: {error.strerror}")
    if not is_successful(listed):
        _refuse(f"{index}: {listed.failure().why}")
    return listed.unwrap()


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(
        f"model.path: {reason}",
        remedy="give a directory in Hugging Face's format, as `save_pretrained` of a causal"
        " language model and of its tokenizer write one",
        paths=("model.path",),
    )
