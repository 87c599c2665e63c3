"""The command as a process: outputs that nobody reads, files that nobody may, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.pure.refit.published_models import QWEN2_5_0_5B

COMMAND = [sys.executable, "-m", "rollsync.shell.cli"]
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "default", "RAY_USAGE_STATS_ENABLED": "0"}

RUN = Path(__file__).parents[2] / "golden" / "run-0.1.0" / "run"


def shell(line: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `line` with the command as "$@"."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *COMMAND, *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )


def config(folder: Path) -> str:
    """A model's published configuration."""
    path = folder / "config.json"
    path.write_bytes(msgspec.json.encode(QWEN2_5_0_5B.config))
    return str(path)


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    for arguments in (
        ["--help"],
        ["--version"],
        ["plan", config(tmp_path)],
        ["inspect", str(RUN)],
        ["inspect", "--json", str(RUN)],
        ["explain", str(RUN)],
    ):
        # It is gone before anything is written.
        done = shell('"$@" > >(exec true) 2>&2; echo "$?"; wait', *arguments)
        assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_closed_output_is_no_error(tmp_path: Path) -> None:
    done = shell('"$@" >&-', "plan", config(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    done = shell('"$@" >&- 2>&-', "inspect", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_disk_is_a_line(tmp_path: Path) -> None:
    done = shell('"$@" > /dev/full', "plan", config(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "rollsync: No space left on device"
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("command", ["run", "plan", "inspect", "explain", "verify"])
def test_what_cannot_be_read_is_a_line(command: str, tmp_path: Path) -> None:
    # A directory where a file belongs and a link to itself: nobody can read them, root neither.
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for unreadable in (loop, tmp_path / "nothing"):
        done = shell('"$@"', command, str(unreadable))
        assert done.returncode == 2
        first, *_ = done.stderr.splitlines()
        assert first.startswith("rollsync: ")
        assert str(unreadable) in first
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


@pytest.mark.slow
def test_an_interrupted_demo_ends_its_run_and_says_nothing(tmp_path: Path) -> None:
    # A shell ignores SIGINT in what it starts in the background, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = tmp_path / "demo"
    demo = subprocess.Popen(
        [*COMMAND, "demo", "--generation", "torch", "--directory", str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    started: list[psutil.Process] = []
    while not started:
        assert demo.poll() is None
        time.sleep(0.05)
        started = [
            child
            for child in psutil.Process(demo.pid).children(recursive=True)
            if "run" in child.cmdline()
        ]
    demo.send_signal(signal.SIGINT)
    _, said = demo.communicate(timeout=120)
    assert (demo.returncode, said) == (130, "")
    assert not [child for child in started if child.is_running()]
