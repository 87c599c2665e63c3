"""The demo's story: make a model, run, kill the run inside a training step, resume, account.

The run is an ordinary `rollsync run` in a child process with a session of its own, so that killing
it kills everything it started, without warning. Rule kept here: what is claimed at the end is read
from the run directory, never remembered.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from msgspec import Struct

from rollsync.pure.rollout.audit import Audit, describe_audit
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.rollout.explain import explain
from rollsync.shell.demo.ending_signals import EndingSignals
from rollsync.shell.demo.evaluation import PROMPTS, mean_reward
from rollsync.shell.errors import RollsyncError
from rollsync.shell.grpo.trainer import WEIGHTS
from rollsync.shell.journal import JournalEntry, Saved, StepClaimed, StepTrained, entries_of
from rollsync.shell.run.saved import SavedRun, close_account, read_saved

POLL_S = 0.02
GONE_TIMEOUT_S = 30.0

ROLLOUT_SNAPSHOT = CheckpointKind.ROLLOUT_SNAPSHOT.value


class DemoFailed(RollsyncError):
    """A part of the story did not happen."""


class KillMoment(Struct, frozen=True, kw_only=True):
    """When the run is killed: inside a training step, from `from_step` on, as soon as a rollout
    snapshot was saved in it; at the latest as soon as `latest_step` has begun."""

    from_step: int
    latest_step: int


def step_to_kill_in(moment: KillMoment, seen: list[JournalEntry]) -> int | None:
    """The step that is being trained, if the run is to be killed after the newest of `seen`."""
    step = None
    for entry in seen:
        if isinstance(entry, StepClaimed):
            step = entry.step
        elif isinstance(entry, StepTrained):
            step = None
    if step is None or step < moment.from_step:
        return None
    newest = seen[-1]
    snapshot = isinstance(newest, Saved) and newest.saved and newest.what == ROLLOUT_SNAPSHOT
    return step if snapshot or step >= moment.latest_step else None


@contextlib.contextmanager
def running_child(config_file: Path, log: Path) -> Iterator[RunningChild]:
    """`rollsync run` of a file as a child process, which does not outlive the `with`.

    It is in a session of its own, where no signal to this process reaches it; so this one takes
    those that end it, also on a terminal that is closed, as it takes a Ctrl-C.

    Args:
        config_file: what it runs.
        log: where its output goes.

    Raises:
        KeyboardInterrupt: at a SIGINT.
        SystemExit: at a SIGTERM or SIGHUP, with the code that a shell gives to that end.
    """
    with EndingSignals() as signals:
        child = None
        try:
            # In the middle of its start, a child would be left behind, known to nobody.
            with signals.held_back(), log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rollsync.shell.cli", "run", str(config_file)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                child = RunningChild(process, log, signals)
            yield child
        finally:
            if child is not None and child.is_running():
                child.kill()


class RunningChild:
    """What `running_child` has started.

    Args:
        process: the child, which leads a process group.
        log: where its output goes.
        signals: those that would end this process.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, signals: EndingSignals) -> None:
        self._process = process
        self._log = log
        self._signals = signals

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> int:
        """SIGKILL to it and to everything it started; how many processes that were."""
        with self._signals.held_back():
            os.killpg(self.pid, signal.SIGSTOP)
            # Also what has left the group (Ray's daemons do): it must not outlive the run either.
            started = _stop_all(psutil.Process(self.pid))
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            _await_gone(started)
        return len(started)

    def require_success(self) -> None:
        """Raise `DemoFailed` with the end of the log unless it has ended well."""
        code = self._process.wait()
        if code != 0:
            tail = self._log.read_text(errors="replace").splitlines()[-15:]
            raise DemoFailed(
                f"the run ended with code {code}:\n" + "\n".join(tail),
                remedy=f"the whole output is in {self._log}",
            )


class JournalFollower:
    """Reads the entries that a journal has grown by.

    Args:
        path: the journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def new_entries(self) -> list[JournalEntry]:
        """Entries since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return list(entries_of(io.BytesIO(whole), source=str(self._path)))


def run_until_killed(
    child: RunningChild,
    follower: JournalFollower,
    moment: KillMoment,
    show: Callable[[JournalEntry], None],
) -> tuple[int, int]:
    """Follow the first run and kill it; the step it died in and how many processes died.

    Raises:
        DemoFailed: it ended before the moment came.
    """
    seen: list[JournalEntry] = []
    for entry in _follow(child, follower):
        show(entry)
        seen.append(entry)
        step = step_to_kill_in(moment, seen)
        if step is not None:
            return step, child.kill()
    child.require_success()
    raise DemoFailed("the run ended before it could be killed", remedy="give it more steps")


def run_to_the_end(
    child: RunningChild, follower: JournalFollower, show: Callable[[JournalEntry], None]
) -> None:
    """Follow the second run to its end.

    Raises:
        DemoFailed: it failed.
    """
    for entry in _follow(child, follower):
        show(entry)
    child.require_success()


def _follow(child: RunningChild, follower: JournalFollower) -> Iterator[JournalEntry]:
    while child.is_running():
        yield from follower.new_entries()
        time.sleep(POLL_S)
    yield from follower.new_entries()


def plan_lines(saved: SavedRun) -> tuple[str, ...]:
    """What the resume will do, from the files."""
    return (f"from {saved.bundle.path}", *explain(saved.plan()))


def account_lines(directory: Path) -> tuple[Audit, tuple[str, ...]]:
    """The account of the finished run, from its files."""
    saved = read_saved(directory)
    result = close_account(saved)
    before = mean_reward(Path(saved.config.model.path), saved.config)
    after = mean_reward(saved.bundle.path / WEIGHTS, saved.config)
    return result, (
        *describe_audit(result),
        f"mean reward                 {before:.3f} before, {after:.3f} after"
        f" ({PROMPTS} other prompts, the model as made and as last saved)",
    )


def _stop_all(root: psutil.Process) -> set[psutil.Process]:
    """Stop a process and all that descend from it: one that is stopped starts no other one."""
    stopped: set[psutil.Process] = set()
    while found := {root, *root.children(recursive=True)} - stopped:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped |= found
    return stopped


def _await_gone(processes: set[psutil.Process]) -> None:
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while left := [process.pid for process in processes if _is_alive(process)]:
        if time.monotonic() > deadline_s:
            raise DemoFailed(f"processes {left} do not end")
        time.sleep(POLL_S)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
