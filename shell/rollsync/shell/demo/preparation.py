"""Makes what the demo runs on: its model, and its configuration."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

import yaml
from msgspec.structs import replace

from rollsync.pure.config import DataConfig
from rollsync.shell.config import ConfigError, read_config
from rollsync.shell.demo.model import Example, WarmUp, make_checkpoint
from rollsync.shell.rollout.prompts import ReasoningGymDataset

WARM_UP = WarmUp(until_loss=0.33, max_steps=1500)
WARM_UP_SAMPLES = 2000
WARM_UP_SEED = 99
"""Of the samples that the warm-up sees: others than the run's."""


def prepare(directory: Path, generation: Literal["vllm", "torch"]) -> Path:
    """Make `directory` with a warmed-up model and a configuration; the configuration's path.

    Raises:
        ConfigError: the directory exists already.
    """
    if directory.exists():
        raise ConfigError(
            f"{directory} exists already",
            remedy="name a new directory, or go on with its run: `rollsync run"
            f" {directory / 'config.yaml'}`",
        )
    directory.mkdir(parents=True)
    settings = yaml.safe_load(files("rollsync.shell.demo").joinpath("config.yaml").read_bytes())
    settings["run"]["directory"] = str(directory)
    settings["model"]["path"] = str(directory / "model")
    settings["generation"]["backend"] = generation
    config_file = directory / "config.yaml"
    config_file.write_text(yaml.safe_dump(settings, sort_keys=False))
    make_checkpoint(directory / "model", examples(read_config(config_file).data), WARM_UP)
    return config_file


def examples(data: DataConfig) -> list[Example]:
    """Questions of the same task, other than the run's, with their answers."""
    dataset = ReasoningGymDataset(replace(data, size=WARM_UP_SAMPLES, seed=WARM_UP_SEED))
    samples = [dataset.sample(index) for index in range(len(dataset))]
    return [
        Example(question=sample.content, answer=dict(sample.extra)["answer"]) for sample in samples
    ]
