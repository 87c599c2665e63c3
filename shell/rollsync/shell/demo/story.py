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

    Args:
        config_file: what it runs.
        log: where its output goes.
    """
    with contextlib.ExitStack() as starting:
        # In the middle of its start, a child would be left behind by a Ctrl-C, known to nobody.
        starting.enter_context(_interrupt_held_back())
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollsync.shell.cli", "run", str(config_file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child = RunningChild(process, log)
        try:
            starting.close()
            yield child
        finally:
            # It is in a session of its own, where no Ctrl-C reaches it.
            if child.is_running():
                child.kill()


@contextlib.contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """A Ctrl-C meanwhile takes effect at the end."""
    handler = signal.getsignal(signal.SIGINT)
    held_back: list[int] = []
    if callable(handler):
        signal.signal(signal.SIGINT, lambda number, frame: held_back.append(number))
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
    if held_back:
        signal.raise_signal(signal.SIGINT)


class RunningChild:
    """What `running_child` has started.

    Args:
        process: the child, which leads a process group.
        log: where its output goes.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Process id, which is also that of its process group."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> int:
        """SIGKILL to it and to everything it started; how many processes that were."""
        started = [self._process.pid, *(p.pid for p in psutil.Process(self.pid).children(True))]
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pid in started[1:]:
            # What had left the group (Ray's daemons do): it must not outlive the run either.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._await_gone(started)
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

    @staticmethod
    def _await_gone(pids: list[int]) -> None:
        deadline_s = time.monotonic() + GONE_TIMEOUT_S
        while any(_is_alive(pid) for pid in pids):
            if time.monotonic() > deadline_s:
                raise DemoFailed(f"processes {[p for p in pids if _is_alive(p)]} do not end")
            time.sleep(POLL_S)


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


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
