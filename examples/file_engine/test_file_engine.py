"""What the author of an engine tests: rollsync's suite, and what is special about this engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from file_engine import FileCheckpointEngine, Home, sweep
from rollsync.shell.refit.engines.conformance import FanOutConformance
from rollsync.shell.refit.engines.conformance_workers import Rollouts, sample_weights
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost

BACKEND = "file_engine:FileCheckpointEngine"


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as made:
        yield made


class TestFileEngine(FanOutConformance):
    backend = BACKEND
    engine_kwargs: ClassVar[Mapping[str, object]] = {}

    @pytest.fixture(autouse=True)
    def _in_a_folder(
        self, folder: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        monkeypatch.setattr(type(self), "engine_kwargs", {"folder": folder})
        yield
        left = list(Path(folder).iterdir())
        # Who was killed has left its home, to be swept up by those who come.
        assert len(left) == ("killed" in request.node.name)
        sweep(Path(folder))
        assert list(Path(folder).iterdir()) == []


def test_a_killed_rollout_worker_is_noticed_by_all_others(tmp_path: Path) -> None:
    with Rollouts(BACKEND, {"folder": str(tmp_path)}, 2) as rollouts:

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in sample_weights().items():
                if name == "three_buckets":
                    rollouts.processes[1].kill()
                    rollouts.processes[1].join()
                yield name, tensor

        with pytest.raises(PeerLost, match=r"policy 0, while it .* is gone"):
            rollouts.send(weights())
        assert PeerFailed.__name__ in rollouts.answer_of(0).error_types


def test_what_a_killed_worker_left_is_swept_up_and_the_living_stay(tmp_path: Path) -> None:
    (tmp_path / "worker-killed").mkdir()
    (tmp_path / "worker-killed" / "alive").touch()
    living = Home(tmp_path)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [living.path]
    engine = FileCheckpointEngine(bucket_size=1024, folder=str(tmp_path))
    assert living.path.exists()
    engine.prepare()
    engine.finalize()
    assert list(tmp_path.iterdir()) == [living.path]
    living.leave()
