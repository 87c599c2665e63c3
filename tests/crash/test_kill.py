"""A real process on a real disk is killed while it saves, over and over, in one run directory."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollsync.shell.store import RealFileSystem, examine
from tests.shell.store.kit import chosen_save, save_snapshot, store_at

ROOT = Path(__file__).parents[2]


def run_and_kill(directory: Path, rng: random.Random) -> int:
    """The last save that the process said was published; 0 if it said none."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.saving_process", directory],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randrange(1, 6))]
        time.sleep(rng.random() * 0.06)
        process.kill()
        lines.extend(process.stdout.readlines())
    assert process.returncode == -9, "it was to be killed, and ended by itself"
    return int(lines[-1])


def check_kills(directory: Path, kills: int) -> None:
    rng = random.Random(7)
    in_the_middle = 0
    for _ in range(kills):
        said = run_and_kill(directory, rng)
        found = chosen_save(store_at(directory))
        assert found in (said, said + 1)
        report = examine(directory, RealFileSystem())
        assert report.is_whole, report
        in_the_middle += found != said or bool(report.notes)
    print(f"{kills} kills, {in_the_middle} in the middle of something")
    assert in_the_middle > 0
    store = store_at(directory)
    bundle = store.choose().bundle
    assert bundle is not None
    save_snapshot(store, bundle.facts.base_train_step, 10**6)
    store.prune()
    assert not examine(directory, RealFileSystem()).notes, "the next save clears up"


def test_a_killed_process_leaves_what_it_said(tmp_path: Path) -> None:
    check_kills(tmp_path / "run", 12)


@pytest.mark.slow
def test_a_process_killed_two_hundred_times_leaves_what_it_said(tmp_path: Path) -> None:
    check_kills(tmp_path / "run", 200)
