"""Long histories with many accidents: processes are killed and power is lost, again and again.

Whatever happened, a resume finds the last save that was reported as published, or one that was
under way after it; and it can go on from there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollsync.shell.errors import RollsyncError
from tests.crash.disk import Disk
from tests.crash.operations import Fault, Operation, SimulatedFileSystem, no_fault
from tests.crash.scenario import (
    CHECKPOINT,
    NOTHING,
    ROOT,
    SNAPSHOT,
    Save,
    check_all_whole,
    found,
    leftovers,
    open_store,
    perform,
)
from tests.processes import in_processes

_CALLS_OF_A_SAVE = 150
"""Roughly: where in a save an accident happens is drawn from twice as many."""


class Killed(BaseException):
    """The process has ended: nothing catches this, and nothing is written any more."""


@dataclass
class History:
    """One machine and what was saved on it."""

    rng: random.Random
    machine: type[SimulatedFileSystem]
    disk: Disk = field(default_factory=Disk)
    steps: dict[int, int] = field(default_factory=lambda: {NOTHING: 0})
    """Step of every save that was tried, by number."""
    committed: int = NOTHING
    under_way: set[int] = field(default_factory=set)
    """Saves that were tried since, and may be there or not."""
    accidents: int = 0

    def start(self) -> None:
        SimulatedFileSystem(self.disk).make_directory(ROOT.parent)

    def live(self) -> None:
        """One process, from its resume to its end."""
        files = self.machine(self.disk)
        number = found(files)
        assert number in {self.committed, *self.under_way}
        assert not files.changes
        store = open_store(files, keep=self.rng.choice((1, 1, 2)))
        store.choose()
        for _ in range(self.rng.randint(1, 3)):
            save = self._next(number)
            ends_at = len(files.operations) + self.rng.randrange(2 * _CALLS_OF_A_SAVE)
            files.fault = killed_from(ends_at)
            try:
                perform(files, store, save)
                self.committed, self.under_way = save.number, set()
                store.prune()
            except Killed:
                self.accidents += 1
                if self.rng.random() < 0.6:
                    self.disk = Disk(self.disk.some_power_loss(self.rng))
                return
            assert not leftovers(files)
            number = save.number
        files.fault = no_fault

    def _next(self, before: int) -> Save:
        step, number = self.steps[before], len(self.steps)
        kind = self.rng.choice((SNAPSHOT, SNAPSHOT, CHECKPOINT))
        step += kind is CHECKPOINT
        self.steps[number] = step
        self.under_way.add(number)
        return Save(number, kind, step)


def killed_from(ends_at: int) -> Fault:
    """The process is killed at that call, and does no other."""

    def fault(index: int, _: Operation) -> None:
        if index >= ends_at:
            raise Killed

    return fault


@dataclass
class Forgetful(SimulatedFileSystem):
    """Says that directories are durable, and does nothing for it."""

    def sync_directory(self, path: Path) -> None:
        self.disk.directory(str(path))


def run_history(seed: int, machine: type[SimulatedFileSystem] = SimulatedFileSystem) -> int:
    """A history to its end; how many accidents it had."""
    history = History(random.Random(seed), machine)
    history.start()
    for _ in range(12):
        history.live()
    survivor = SimulatedFileSystem.after(history.disk.visible())
    check_all_whole(survivor)
    assert found(survivor) in {history.committed, *history.under_way}
    return history.accidents


def test_a_resume_finds_the_last_save_after_any_history() -> None:
    accidents = sum(run_history(seed) for seed in range(60))
    print(f"60 histories with {accidents} accidents")
    assert accidents > 200


@pytest.mark.slow
def test_a_resume_finds_the_last_save_after_many_histories() -> None:
    accidents = sum(in_processes(run_history, range(1000, 1800)))
    print(f"800 histories with {accidents} accidents")
    assert accidents > 3000


def test_histories_notice_a_disk_that_does_not_keep_names() -> None:
    with pytest.raises((AssertionError, RollsyncError)):
        sum(run_history(seed, Forgetful) for seed in range(20))


def test_an_operation_that_a_killed_process_would_do_is_not_done() -> None:
    files = SimulatedFileSystem(Disk({"runs": {}}))
    files.fault = killed_from(20)
    with pytest.raises(Killed):
        perform(files, open_store(files), Save(1, SNAPSHOT, 0))
    before = files.disk.visible()
    with pytest.raises(Killed):
        files.make_directory(ROOT.parent / "late")
    assert files.disk.visible() == before
