"""`rollsync run` as a user starts it, while somebody kills and halts its engines' processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from rollsync.pure.config import MasterConfig
from rollsync.pure.refit.fleet.state import FleetSettings
from rollsync.shell.journal import EngineChanged, JournalEntry, Saved, StepTrained, read_journal
from rollsync.shell.run.saved import JOURNAL
from tests.shell.run.commands import said_by, start
from tests.shell.run.fleet_runs import endless_config, engine_changes
from tests.shell.run.runs import closed_account, entries_of

PATIENCE_S = 400
# One that is halted has to be given up soon, and one that is only slow never.
SETTINGS = FleetSettings(probe_interval_s=1.0, probe_timeout_s=6.0, suspect_after=1, dead_after=4)


class Watched:
    """A run in a process of its own, and what its journal says."""

    def __init__(self, config: MasterConfig) -> None:
        self._config = config
        self._journal = Path(config.run.directory) / JOURNAL
        self.process = start(config)

    def wait_until(self, holds: Callable[[list[JournalEntry]], bool]) -> list[JournalEntry]:
        """The journal, as soon as `holds` is true of it."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            entries = list(read_journal(self._journal))
            if holds(entries):
                return entries
            if self.process.poll() is not None or time.monotonic() > until_s:
                self.process.kill()
                raise AssertionError(said_by(self._config)[-3000:])
            time.sleep(0.1)

    def wait_healthy(self, engine: str) -> int:
        """Wait until an engine serves; its process."""
        entries = self.wait_until(lambda seen: "healthy" in engine_changes(seen, engine))
        pids = [e.pid for e in entries if isinstance(e, EngineChanged) and e.engine == engine]
        pid = pids[-1]
        assert pid is not None
        return pid

    def wait_steps(self, count: int) -> None:
        """Wait until this many further steps are trained."""
        before = steps_of(list(read_journal(self._journal)))
        self.wait_until(lambda seen: steps_of(seen) >= before + count)

    def end(self) -> tuple[int, str]:
        """The exit code and what the command said."""
        return self.process.wait(timeout=PATIENCE_S), said_by(self._config)


def steps_of(entries: list[JournalEntry]) -> int:
    return max((each.step for each in entries if isinstance(each, StepTrained)), default=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_and_halted_engines_are_replaced(tmp_path: Path, model_path: Path) -> None:
    config = endless_config(tmp_path / "run", model_path, engines=2, fleet=SETTINGS)
    run = Watched(config)
    os.kill(run.wait_healthy("engine-0"), signal.SIGKILL)
    run.wait_healthy("engine-2")
    run.wait_steps(2)
    halted = run.wait_healthy("engine-1")
    os.kill(halted, signal.SIGSTOP)
    run.wait_healthy("engine-3")
    wait_gone(halted)
    check_goes_on_without(run, config, ["engine-0", "engine-1"], newest="engine-3")


def wait_gone(pid: int) -> None:
    """Wait until a process has ended: what it held, a device's memory for one, is free again."""
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=PATIENCE_S)
    assert not psutil.pid_exists(pid), "given up, and still there"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_vllm_engine_is_replaced(tmp_path: Path, model_path: Path) -> None:
    config = endless_config(tmp_path / "run", model_path, engines=2, fleet=SETTINGS)
    config = replace(config, generation=replace(config.generation, backend="vllm"))
    run = Watched(config)
    os.kill(run.wait_healthy("engine-0"), signal.SIGKILL)
    run.wait_healthy("engine-2")
    check_goes_on_without(run, config, ["engine-0"], newest="engine-2")


def check_goes_on_without(
    run: Watched, config: MasterConfig, lost: list[str], *, newest: str
) -> None:
    """The run trains on, stops when it is asked to, and has accounted for every prompt."""
    run.wait_steps(2)
    run.process.send_signal(signal.SIGTERM)
    code, said = run.end()
    assert code == 0, said
    assert f"{newest} is healthy" in said
    entries = entries_of(config)
    assert all(engine_changes(entries, engine)[-1] == "dead" for engine in lost)
    closed_account(config)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_below_the_minimum_the_command_ends_with_its_own_exit_code(
    tmp_path: Path, model_path: Path
) -> None:
    config = endless_config(
        tmp_path / "run", model_path, engines=2, fleet=replace(SETTINGS, min_healthy=2)
    )
    run = Watched(config)
    pid = run.wait_healthy("engine-1")
    run.wait_steps(2)
    os.kill(pid, signal.SIGKILL)
    code, said = run.end()
    assert code == 3, said
    assert "generation.fleet.min_healthy" in said
    closed_account(config)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stop_that_could_not_be_saved_is_no_success(tmp_path: Path, model_path: Path) -> None:
    """A supervisor that asked for it has to know, before it takes the machine away."""
    config = endless_config(tmp_path / "run", model_path, engines=1)
    # The step does not end meanwhile: its checkpoint would be what fails.
    config = replace(
        config,
        data=replace(config.data, size=4000),
        grpo=replace(config.grpo, num_prompts_per_step=2000),
    )
    run = Watched(config)
    run.wait_until(lambda seen: any(isinstance(each, Saved) and each.saved for each in seen))
    segments = Path(config.run.directory) / "segments"
    segments.rename(tmp_path / "gone")
    segments.write_bytes(b"")
    run.process.send_signal(signal.SIGTERM)
    code, said = run.end()
    assert code == 1, said
    assert "last snapshot: io_error" in said
    assert "The same command goes on from the save before." in said
    segments.unlink()
    (tmp_path / "gone").rename(segments)
    closed_account(config)
