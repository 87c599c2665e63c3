"""`rollsync verify` and `rollsync gc` on run directories, whole and damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollsync.pure.config import CheckpointingConfig, RetentionConfig, RunConfig
from rollsync.pure.snapshot.manifest import MANIFEST_FILE
from rollsync.pure.snapshot.places import ANCHOR_FILE, LOCK_FILE
from rollsync.shell.cli import main
from rollsync.shell.journal import Journal, Resumed
from rollsync.shell.run.saved import CONFIG, JOURNAL, write_config
from rollsync.shell.store import RealFileSystem, collect, examine
from tests.shell.store.kit import (
    STATE,
    chosen_save,
    config,
    save_checkpoint,
    save_snapshot,
    store_at,
)

Capture = pytest.CaptureFixture[str]


def configure(root: Path, retention: RetentionConfig) -> None:
    """Note in the run directory how much the run keeps."""
    checkpointing = CheckpointingConfig(retention=retention)
    write_config(replace(config(), run=RunConfig(directory=str(root)), checkpointing=checkpointing))


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Snapshot 1, checkpoint 2, snapshots 3, 4 and 5 under it."""
    root = tmp_path / "run"
    configure(root, RetentionConfig())
    store = store_at(root)
    save_snapshot(store, 0, 1, b"rows a")
    save_checkpoint(store, 1, 2, b"rows b")
    for save in (3, 4, 5):
        save_snapshot(store, 1, save, b"rows b", f"rows of {save}".encode())
    store.close()
    return root


def everything(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_whole_run_is_listed_in_the_order_of_a_resume(
    run_directory: Path, capsys: Capture
) -> None:
    before = everything(run_directory)
    assert main(["verify", str(run_directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:5]] == [
        ["step_000001/snapshots/000003", "whole"],
        ["step_000001/snapshots/000002", "whole"],
        ["step_000001/snapshots/000001", "whole"],
        ["step_000001", "whole"],
        ["bootstrap/snapshots/000001", "whole"],
    ]
    assert lines[5:] == ["5 bundles, 0 damaged; a resume takes step_000001/snapshots/000003"]
    assert everything(run_directory) == before


def test_damage_is_told_in_words(run_directory: Path, capsys: Capture) -> None:
    (run_directory / "step_000001" / "snapshots" / "000003" / STATE).write_bytes(b"state 6")
    (run_directory / "step_000001" / "snapshots" / "000002" / STATE).unlink()
    (run_directory / "bootstrap" / "anchor.bin").write_bytes(b"")
    (run_directory / "bootstrap" / "notes.txt").write_bytes(b"mine")
    (run_directory / ".draft-0-step_000002").mkdir()
    (run_directory / "step_000001" / "events.log").write_bytes(b"")
    (run_directory / "segments" / ("0" * 64)).write_bytes(b"")
    assert main(["verify", str(run_directory)]) == 1
    text = capsys.readouterr().out
    assert f"000003  damaged  {STATE} has other content than the manifest says" in text
    assert f"000002  damaged  {STATE} is missing" in text
    assert "problem: " in text
    assert "anchor.bin: " in text
    assert "note: .draft-0-step_000002: left by an interrupted save" in text
    assert "note: step_000001/events.log: not in the manifest" in text
    assert f"note: segments/{'0' * 64}: no bundle needs it" in text
    assert "notes.txt" not in text
    assert "5 bundles, 2 damaged; a resume takes step_000001/snapshots/000001" in text


class Counting(RealFileSystem):
    """Counts how often each file is read."""

    def __init__(self) -> None:
        self.reads: Counter[Path] = Counter()

    def read(self, path: Path) -> Iterator[bytes]:
        self.reads[path] += 1
        return super().read(path)


def test_what_may_be_large_is_read_once(run_directory: Path) -> None:
    limits = RetentionConfig(trainer_checkpoints=1)
    large = {
        path
        for path in run_directory.rglob("*")
        if path.is_file() and path.name not in (MANIFEST_FILE, ANCHOR_FILE, LOCK_FILE, CONFIG)
    }
    examining, collecting = Counting(), Counting()
    assert examine(run_directory, examining).is_whole
    collect(run_directory, collecting, limits, dry_run=True)
    for files in (examining, collecting):
        assert {path: files.reads[path] for path in large} == dict.fromkeys(large, 1)


@pytest.mark.parametrize("content", [b"\x8f\x00 \n\xfe\n" * 50, b"\x8f\x00 \xfe" * 50])
def test_a_journal_without_a_line_is_a_problem(
    content: bytes, run_directory: Path, capsys: Capture
) -> None:
    (run_directory / JOURNAL).write_bytes(content)
    assert main(["verify", str(run_directory)]) == 1
    said = f"{JOURNAL}: no line can be read in its {len(content)} bytes"
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(said) for line in lines if line.startswith("problem: ")] == [True]
    for path in (run_directory, run_directory / JOURNAL):
        assert main(["inspect", str(path)]) == 2
        assert said in capsys.readouterr().err
    (run_directory / JOURNAL).write_bytes(b"")
    assert main(["verify", str(run_directory)]) == 0


def test_verify_and_explain_agree_about_a_lost_configuration(
    run_directory: Path, capsys: Capture
) -> None:
    (run_directory / CONFIG).unlink()
    assert main(["explain", str(run_directory)]) == 2
    error = capsys.readouterr().err
    assert "has no config.json" in error
    assert "no run directory" not in error
    assert main(["verify", str(run_directory)]) == 0, "a store by itself has no configuration"
    capsys.readouterr()
    with closing(Journal(run_directory / JOURNAL)) as journal:
        journal.write(Resumed(train_steps=0, source=None))
    assert main(["verify", str(run_directory)]) == 1
    text = capsys.readouterr().out
    assert "problem: config.json is missing" in text
    assert "5 bundles, 0 damaged; a resume takes step_000001/snapshots/000003" in text


def test_json_has_everything(run_directory: Path, capsys: Capture) -> None:
    assert main(["verify", "--json", str(run_directory)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["bundles"]) == 5
    assert report["bundles"][0]["problem"] is None
    assert report["has_anchor"] is True


def test_a_bundle_of_another_run_is_a_problem(
    run_directory: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = store_at(tmp_path / "other", dataset_digest="d1")
    path = save_snapshot(other, 0, 1)
    path.rename(run_directory / "bootstrap" / "snapshots" / "000002")
    assert main(["verify", str(run_directory)]) == 1
    assert "bootstrap/snapshots/000002: it belongs to a run with" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "gc"])
def test_no_run_directory_is_said(tmp_path: Path, command: str, capsys: Capture) -> None:
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert "cannot be listed" in capsys.readouterr().err
    assert main([command, str(tmp_path)]) == 2
    assert "no run has saved anything here" in capsys.readouterr().err


def test_a_journal_of_somebody_else_makes_no_run_directory(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / JOURNAL).write_bytes(b"{}\n")
    assert main(["verify", str(tmp_path)]) == 2
    assert "no run has saved anything here" in capsys.readouterr().err


def test_gc_leaves_what_is_only_called_like_a_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step_00000{step}").mkdir()
        (tmp_path / f"step_00000{step}" / "weights").write_bytes(b"mine")
    before = everything(tmp_path)
    assert main(["gc", str(tmp_path), "--trainer-checkpoints=1"]) == 2
    assert "no run has saved anything here" in capsys.readouterr().err
    assert everything(tmp_path) == before


def test_gc_keeps_what_the_run_keeps(run_directory: Path, capsys: Capture) -> None:
    """Snapshots 3, 4 and 5 lie under the checkpoint; two of them are what stays by default."""
    configure(run_directory, RetentionConfig(trainer_checkpoints=3, snapshots_per_checkpoint=3))
    before = everything(run_directory)
    assert main(["gc", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert "trainer_checkpoints 3 (config.json), snapshots_per_checkpoint 3 (config.json)" in text
    assert everything(run_directory) == before
    assert main(["gc", "--snapshots-per-checkpoint=1", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert "trainer_checkpoints 3 (config.json), snapshots_per_checkpoint 1 (command line)" in text
    assert not (run_directory / "step_000001" / "snapshots" / "000002").exists()
    assert (run_directory / "bootstrap" / "snapshots" / "000001").exists()


@pytest.mark.parametrize("content", [None, b"checkpointing: 7", b"\xff"])
def test_without_a_configuration_gc_has_to_be_told_how_much_stays(
    content: bytes | None, run_directory: Path, capsys: Capture
) -> None:
    (run_directory / CONFIG).unlink()
    if content is not None:
        (run_directory / CONFIG).write_bytes(content)
    before = everything(run_directory)
    for given in ([], ["--trainer-checkpoints=1"], ["--snapshots-per-checkpoint=1"]):
        assert main(["gc", str(run_directory), *given]) == 2
        error = capsys.readouterr().err
        assert "how much the run keeps is not known" in error
        assert CONFIG in error
        assert "--trainer-checkpoints and --snapshots-per-checkpoint" in error
    assert everything(run_directory) == before
    both = ["--trainer-checkpoints=1", "--snapshots-per-checkpoint=1"]
    assert main(["gc", str(run_directory), *both]) == 0
    assert "trainer_checkpoints 1 (command line)" in capsys.readouterr().out
    assert chosen_save(store_at(run_directory)) == 5


def test_gc_says_and_does_the_same(run_directory: Path, capsys: Capture) -> None:
    before = everything(run_directory)
    arguments = ["gc", str(run_directory), "--trainer-checkpoints=1"]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert everything(run_directory) == before
    assert main(arguments) == 0
    done = capsys.readouterr().out.splitlines()
    assert said[:-1] == done[:-1]
    assert "bootstrap/snapshots/000001" in said
    assert "step_000001/snapshots/000001" in said
    freed = sum(map(len, before.values())) - sum(map(len, everything(run_directory).values()))
    assert said[-1] == f"{len(said) - 2} names, would free {freed} bytes"
    assert done[-1] == f"{len(done) - 2} names, freed {freed} bytes"
    assert chosen_save(store_at(run_directory)) == 5
    assert main(["verify", str(run_directory)]) == 0


def test_gc_compares_contents_before_it_removes_anything(
    run_directory: Path, capsys: Capture
) -> None:
    for name in ("000003", "000002"):
        path = run_directory / "step_000001" / "snapshots" / name / STATE
        path.write_bytes(b"state 9")
    assert main(["gc", str(run_directory), "--snapshots-per-checkpoint=1"]) == 0
    capsys.readouterr()
    assert chosen_save(store_at(run_directory)) == 3


def test_gc_sweeps_what_was_left(run_directory: Path, capsys: Capture) -> None:
    (run_directory / ".draft-0-step_000002").mkdir()
    (run_directory / ".draft-0-step_000002" / "weights").write_bytes(b"12345")
    assert main(["gc", str(run_directory)]) == 0
    assert ".draft-0-step_000002" in capsys.readouterr().out
    assert not (run_directory / ".draft-0-step_000002").exists()


HOLDING = """
import sys
from pathlib import Path
from rollsync.shell.store import RealFileSystem
lock = RealFileSystem().lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_gc_refuses_while_a_run_writes(run_directory: Path, capsys: Capture) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", HOLDING, run_directory / LOCK_FILE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "held\n"
        before = everything(run_directory)
        assert main(["gc", str(run_directory)]) == 2
        assert "another process writes" in capsys.readouterr().err
        assert main(["gc", str(run_directory), "--dry-run"]) == 0
        assert everything(run_directory) == before
    assert main(["gc", str(run_directory)]) == 0
