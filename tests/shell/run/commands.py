"""`rollsync run` in a process of its own, as a user starts it, and as a machine ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollsync.pure.config import MasterConfig
from rollsync.shell.journal import JournalEntry, read_journal
from rollsync.shell.run.saved import JOURNAL
from tests.shell.run.runs import ROOT, write_file

_PATIENCE_S = 240


def start(config: MasterConfig, *options: str) -> subprocess.Popen[bytes]:
    """Start the command. What it says goes to a file: a pipe that nobody empties would halt it."""
    with _said_file(config).open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "rollsync.shell.cli", "run", write_file(config), *options],
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )


def said_by(config: MasterConfig) -> str:
    """All that the newest command of this run has said so far."""
    return _said_file(config).read_text()


def _said_file(config: MasterConfig) -> Path:
    return Path(f"{config.run.directory}.said")


def run(config: MasterConfig, *options: str) -> tuple[int, str]:
    """Run the command to its end; its exit code and all that it said."""
    with start(config, *options) as process:
        process.wait(timeout=_PATIENCE_S)
    return process.returncode, said_by(config)


def kill_when(
    config: MasterConfig, seen: Callable[[list[JournalEntry]], bool], *options: str
) -> None:
    """Start the command and SIGKILL it as soon as the journal says what is waited for."""
    with start(config, *options) as process:
        wait_until(process, config, seen)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def wait_until(
    process: subprocess.Popen[bytes],
    config: MasterConfig,
    seen: Callable[[list[JournalEntry]], bool],
) -> None:
    """Wait until the journal of a command that runs says what is waited for."""
    journal = Path(config.run.directory) / JOURNAL
    until_s = time.monotonic() + _PATIENCE_S
    while not (journal.exists() and seen(list(read_journal(journal)))):
        if process.poll() is not None or time.monotonic() > until_s:
            process.kill()
            raise AssertionError(f"the run has not come so far: {said_by(config)[-3000:]}")
        time.sleep(0.02)
