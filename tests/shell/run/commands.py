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


def start(config: MasterConfig, *options: str) -> subprocess.Popen[str]:
    """Start the command; its process leads a group."""
    return subprocess.Popen(
        [sys.executable, "-m", "rollsync.shell.cli", "run", write_file(config), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
    )


def run(config: MasterConfig, *options: str) -> tuple[int, str]:
    """Run the command to its end; its exit code and all that it said."""
    with start(config, *options) as process:
        said, _ = process.communicate(timeout=_PATIENCE_S)
    return process.returncode, said


def kill_when(
    config: MasterConfig, seen: Callable[[list[JournalEntry]], bool], *options: str
) -> None:
    """Start the command and SIGKILL it as soon as the journal says what is waited for."""
    journal = Path(config.run.directory) / JOURNAL
    until_s = time.monotonic() + _PATIENCE_S
    with start(config, *options) as process:
        while not (journal.exists() and seen(list(read_journal(journal)))):
            if process.poll() is not None or time.monotonic() > until_s:
                process.kill()
                said, _ = process.communicate()
                raise AssertionError(f"the run has not come so far: {said[-3000:]}")
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
