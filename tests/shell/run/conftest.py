"""One fork server and one model for all runs of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollsync.shell.demo.model import WarmUp, make_checkpoint
from rollsync.shell.demo.preparation import examples
from tests.shell.run.runs import Children, small_config


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers some prompts right."""
    path = tmp_path_factory.mktemp("model") / "model"
    config = small_config(path.parent / "unused", path)
    make_checkpoint(
        path, examples(config.data), WarmUp(until_loss=0.0, max_steps=150, batch_size=32)
    )
    return path


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """The fork server."""
    with Children(tmp_path_factory.mktemp("children") / "errors") as children:
        yield children
