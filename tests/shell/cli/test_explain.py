"""`rollsync explain` says what a resume would do, changes nothing, and needs the base package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.codecs import encode
from rollsync.pure.config import RunConfig, dataset_digest
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.rollout.events import BatchReserved
from rollsync.pure.rollout.state import (
    DataloaderState,
    PromptReference,
    RecoveryGranularity,
    fresh_state,
)
from rollsync.pure.rollout.transitions import apply
from rollsync.shell.cli import main
from rollsync.shell.run.saved import write_config
from tests.shell.store.kit import STATE, config, facts, store_at

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run that was saved with one prompt reserved."""
    root = tmp_path / "run"
    master_config = replace(config(), run=RunConfig(directory=str(root)))
    digest = dataset_digest(master_config.data)
    reserved = BatchReserved(
        prompts=(
            PromptReference(
                prompt_id="epoch-0-prompt-0",
                sample_id="sum-0",
                task="sum",
                epoch=0,
                position=0,
                content_digest="00" * 32,
            ),
        ),
        dataloader_after=DataloaderState(epoch=0, position=1, dataset_digest=digest, seed=0),
        granularity=RecoveryGranularity.SIBLING,
        expected_generations=2,
    )
    state = fresh_state(dataset_digest=digest, seed=0, sampler_stamps_target_steps=False)
    write_config(master_config)
    store = store_at(root, master_config=master_config, dataset_digest=digest)
    kind = CheckpointKind.ROLLOUT_SNAPSHOT
    store.begin(kind, 0).publish(facts(kind, 0), {STATE: encode(apply(state, reserved).unwrap())})
    store.close()
    return root


def test_every_group_in_flight_is_explained_and_nothing_changes(
    run_directory: Path, capsys: Capture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_directory.rglob("*")}
    assert main(["explain", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert "snapshots/000001" in text.replace("\n", "")
    assert "epoch-0-prompt-0" in text
    assert {path: path.stat().st_mtime_ns for path in run_directory.rglob("*")} == before


def test_it_works_without_what_moves_weights(run_directory: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'ray', 'vllm', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "from rollsync.shell.cli import main\n"
        f"sys.exit(main(['explain', {str(run_directory)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "epoch-0-prompt-0" in done.stdout


def test_a_directory_without_a_save_is_refused(tmp_path: Path, capsys: Capture) -> None:
    write_config(replace(config(), run=RunConfig(directory=str(tmp_path))))
    assert main(["explain", str(tmp_path)]) == 2
    assert "holds no save" in capsys.readouterr().err
