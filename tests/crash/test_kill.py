"""A real process on a real disk is killed while it saves, over and over, in one run directory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollsync.shell.store import RealFileSystem, examine
from tests.crash.saving_process import ENDED
from tests.shell.store.kit import chosen_save, save_snapshot, store_at

ROOT = Path(__file__).parents[2]


@contextmanager
def saving_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Forks children that save into a directory."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.saving_process", directory],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        # Its exit closes the pipes, upon which the process ends.
        yield process


def run_and_kill(process: subprocess.Popen[str], rng: random.Random) -> int:
    """The last save that a child said was published."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    pid = int(process.stdout.readline())
    saves = [int(process.stdout.readline()) for _ in range(rng.randrange(1, 6))]
    time.sleep(rng.random() * 0.06)
    # The id is the child's own until its parent has waited for it.
    os.kill(pid, signal.SIGKILL)
    while not (line := process.stdout.readline()).startswith(ENDED):
        saves.append(int(line))
    assert line == f"{ENDED}{-signal.SIGKILL}\n", "it was to be killed, and ended by itself"
    return saves[-1]


def check_kills(directory: Path, kills: int) -> None:
    rng = random.Random(7)
    in_the_middle = 0
    with saving_process(directory) as process:
        for _ in range(kills):
            said = run_and_kill(process, rng)
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
