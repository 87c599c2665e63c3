"""When the demo kills its run, and what it shows."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest
from rich.console import Console

from rollsync.shell.cli.demo import tell
from rollsync.shell.config import ConfigError, read_config
from rollsync.shell.demo.preparation import prepare
from rollsync.shell.demo.story import KillMoment, running_child, step_to_kill_in
from rollsync.shell.journal import (
    JournalEntry,
    PromptDropped,
    Resumed,
    Saved,
    StepClaimed,
    StepTrained,
    WeightsSynced,
)
from rollsync.shell.run.display import RunDisplay
from rollsync.shell.run.journal_lines import line_of

MOMENT = KillMoment(from_step=2, latest_step=4)


def claimed(step: int) -> StepClaimed:
    return StepClaimed(step=step, prompt_ids=("p",))


def trained(step: int) -> StepTrained:
    return StepTrained(
        step=step, prompt_ids=("p",), mean_reward=0.5, loss=0.25, weight_versions=(step - 2,)
    )


def saved(what: str, step: int) -> Saved:
    return Saved(what=what, saved=True, reason="completed", train_steps=step, pause_ms=0.5)


@pytest.mark.parametrize(
    ("seen", "step"),
    [
        ([claimed(1), saved("rollout_snapshot", 0)], None),
        ([claimed(1), trained(1), saved("rollout_snapshot", 1)], None),
        ([claimed(2)], None),
        ([claimed(2), saved("trainer_checkpoint", 1)], None),
        ([claimed(2), saved("rollout_snapshot", 1)], 2),
        ([claimed(3), trained(3), claimed(4)], 4),
    ],
)
def test_the_run_is_killed_inside_a_step_that_has_a_snapshot(
    seen: list[JournalEntry], step: int | None
) -> None:
    assert step_to_kill_in(MOMENT, seen) == step


def test_entries_are_shown_in_plain_lines_without_a_terminal() -> None:
    output = io.StringIO()
    with RunDisplay(Console(file=output, width=200), title="run") as display:
        display.show(Resumed(train_steps=0, source=None))
        display.show(WeightsSynced(weight_version=3, bytes=2_000_000, seconds=0.001))
        display.show(trained(4))
        display.show(PromptDropped(prompt_id="e0-p1", reason="stale"))
    lines = output.getvalue().splitlines()
    assert lines[0].endswith("a fresh run")
    assert "weight version 3: 2.00 MB in 1.0 ms, 2.000 GB/s" in lines[1]
    assert "reward 0.500  loss 0.250  staleness 1" in lines[2]
    assert lines[3].endswith("prompt e0-p1: stale")


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_resume_passed_over_is_shown_with_the_reason(terminal: bool) -> None:
    output = io.StringIO()
    refused = "step_000004: state.bin has 7 bytes, the manifest says [8]"
    with RunDisplay(
        Console(file=output, width=200, force_terminal=terminal), title="run"
    ) as display:
        display.show(
            Resumed(train_steps=3, source="step_000003/snapshots/000001", refused=(refused,))
        )
        display.show(trained(4))
    shown = [line for line in output.getvalue().splitlines() if "passed over" in line]
    assert [line.endswith(f"resume  passed over {refused}") for line in shown] == [True]


def test_a_save_that_failed_says_why() -> None:
    failed = Saved(
        what="rollout_snapshot", saved=False, reason="io_error", train_steps=2, pause_ms=0.0
    )
    assert "not saved (io_error)" in line_of(failed)


def test_the_live_table_shows_steps_and_figures() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True)
    with RunDisplay(console, title="run") as display:
        display.show(trained(7))
        display.show(WeightsSynced(weight_version=7, bytes=1_000_000, seconds=0.01))
        display.show(saved("rollout_snapshot", 7))
    shown = output.getvalue()
    assert "engines serve version 7" in shown
    assert "1 rollout snapshots" in shown


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        prepare(tmp_path, "torch")


ENDS = [
    (signal.SIGINT, KeyboardInterrupt),
    (signal.SIGTERM, SystemExit),
    (signal.SIGHUP, SystemExit),
]


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """What a shell starts in the background ignores a SIGINT, and what nohup starts a SIGHUP, and
    children inherit that."""
    default = {signal.SIGINT: signal.default_int_handler}
    handlers = {
        number: signal.signal(number, default.get(number, signal.SIG_DFL)) for number, _ in ENDS
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of a run: a process with a child in its group and one in a session of its own; the
    file that tells their process ids."""
    told = tmp_path / "family"
    run = tmp_path / "run"
    run.write_text(
        "#!/bin/sh\nsleep 600 & one=$!\nsetsid sleep 600 & two=$!\n"
        f"echo $$ $one $two > {told}.new; mv {told}.new {told}; wait\n"
    )
    run.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(run))
    return told


def members(family: Path) -> list[psutil.Process]:
    while not family.exists():
        time.sleep(0.005)
    return [psutil.Process(int(pid)) for pid in family.read_text().split()]


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("number", "raised"), ENDS)
def test_a_signal_while_a_run_is_started_leaves_no_run_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    raised: type[BaseException],
) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        """The signal comes when the process is there, and nobody knows it yet."""

        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(["sleep", "600"], start_new_session=True)
            started.append(self.pid)
            signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    handler = signal.getsignal(number)
    with pytest.raises(raised), running_child(tmp_path / "run.yaml", tmp_path / "log"):
        raise AssertionError("the signal was lost")
    assert signal.getsignal(number) is handler
    assert not psutil.pid_exists(started[0])


@pytest.mark.parametrize(("number", "raised"), ENDS)
@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_while_a_run_goes_on_leave_no_run_behind(
    tmp_path: Path,
    family: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    raised: type[BaseException],
    again: signal.Signals,
) -> None:
    children = psutil.Process.children

    def interrupted(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        signal.raise_signal(again)
        return children(process, recursive)

    monkeypatch.setattr(psutil.Process, "children", interrupted)
    run: list[psutil.Process] = []

    def go_on() -> None:
        with running_child(tmp_path / "run.yaml", tmp_path / "log"):
            run.extend(members(family))
            assert living(run) == run
            signal.raise_signal(number)

    with pytest.raises(raised) as ended:
        go_on()
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 128 + number
    assert living(run) == []


def test_a_signal_while_a_run_is_killed_ends_the_demo_when_all_of_it_is_gone(
    tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspend = psutil.Process.suspend

    def interrupted(process: psutil.Process) -> None:
        signal.raise_signal(signal.SIGTERM)
        suspend(process)

    monkeypatch.setattr(psutil.Process, "suspend", interrupted)
    run: list[psutil.Process] = []

    def go_on() -> None:
        with running_child(tmp_path / "run.yaml", tmp_path / "log") as child:
            run.extend(members(family))
            child.kill()
            raise AssertionError("the signal was lost")

    with pytest.raises(SystemExit) as ended:
        go_on()
    assert ended.value.code == 128 + signal.SIGTERM
    assert living(run) == []


def test_a_killed_run_is_counted_with_all_that_it_started(tmp_path: Path, family: Path) -> None:
    with running_child(tmp_path / "run.yaml", tmp_path / "log") as child:
        run = members(family)
        assert child.kill() == len(run)
        assert living(run) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path, family: Path) -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running_child(tmp_path / "run.yaml", tmp_path / "log"):
            run = members(family)
            signal.raise_signal(signal.SIGHUP)
            assert living(run) == run
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert living(run) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("generation", ["torch", "vllm"])
def test_the_demo_is_killed_resumed_and_accounts_for_every_prompt(
    tmp_path: Path, generation: Literal["torch", "vllm"]
) -> None:
    output = io.StringIO()
    directory = tmp_path / "run"
    assert tell(Console(file=output, width=200), directory, generation) == 0
    shown = output.getvalue()
    prompts = read_config(directory / "config.yaml").data.size
    assert "inside training step" in shown
    assert f"prompts handed out          {prompts}" in shown
    assert f"trained exactly once        {prompts}" in shown
    assert "the account closes" in shown
