"""Power is lost at any moment of a run: the journal says all that the save that is found holds.

A run is a chain of steps, each with a line and then a save, as the controller writes them; which
step a save holds is told by its number.
"""

from __future__ import annotations

import io
from pathlib import Path

from rollsync.shell.journal import (
    Journal,
    JournalDamaged,
    JournalEntry,
    PromptDropped,
    Resumed,
    Saved,
    StepTrained,
    entries_of,
)
from tests.crash.disk import Disk
from tests.crash.explore import fingerprint, snapshot
from tests.crash.operations import SYNCS, Operation, SimulatedFileSystem, replay
from tests.crash.scenario import CHECKPOINT, Save, found, open_store, perform

JOURNAL = Path("/runs/run/journal.jsonl")
STEPS = 3


def trained(step: int) -> StepTrained:
    return StepTrained(
        step=step, prompt_ids=(f"p{step}",), mean_reward=0.5, loss=0.1, weight_versions=(step - 1,)
    )


def save_and_note(files: SimulatedFileSystem, journal: Journal, steps: range) -> None:
    """Steps, each with its checkpoint, whose number is that of the step."""
    store = open_store(files, keep=STEPS)
    journal.write(Resumed(train_steps=steps.start - 1, source=None))
    for step in steps:
        journal.write(trained(step))
        journal.write(PromptDropped(prompt_id=f"q{step}", reason="stale"))
        journal.sync()
        perform(files, store, Save(step, CHECKPOINT, step))
        journal.write(
            Saved(what="c", saved=True, reason="completed", train_steps=step, pause_ms=0.0)
        )
    store.close()


def run(steps: int = STEPS) -> tuple[Disk, list[Operation]]:
    """A run's operations, from a machine on which somebody has made a directory for runs."""
    files = SimulatedFileSystem()
    files.make_directory(JOURNAL.parent.parent)
    before, since = snapshot(files), len(files.operations)
    save_and_note(files, Journal(JOURNAL, files), range(1, steps + 1))
    return before, SimulatedFileSystem(operations=files.operations[since:]).changes


def told(files: SimulatedFileSystem) -> list[JournalEntry]:
    try:
        data = b"".join(files.read(JOURNAL))
    except FileNotFoundError:
        return []
    return list(entries_of(io.BytesIO(data), source=str(JOURNAL)))


def missing(files: SimulatedFileSystem) -> list[JournalEntry]:
    """What the journal should say of the save that is found."""
    said = told(files)
    expected: list[JournalEntry] = []
    for step in range(1, found(files) + 1):
        expected += [trained(step), PromptDropped(prompt_id=f"q{step}", reason="stale")]
    return [entry for entry in expected if entry not in said]


def crashes_that_lose_evidence(before: Disk, operations: list[Operation]) -> int:
    """How many; where the journal is refused, all is lost."""
    losses, looked_at = 0, set[bytes]()
    for done, disk in enumerate(replay(before, operations)):
        for tree in (disk.visible(), *disk.after_power_loss(done)):
            if (key := fingerprint(tree)) in looked_at:
                continue
            looked_at.add(key)
            try:
                losses += bool(missing(SimulatedFileSystem.after(tree)))
            except JournalDamaged:
                losses += 1
    return losses


def test_every_save_that_is_found_is_accounted_for() -> None:
    assert crashes_that_lose_evidence(*run()) == 0


def test_the_next_process_goes_on_after_whatever_is_left() -> None:
    before, operations = run(steps=2)
    last = len(operations)
    states = 0
    for done, disk in enumerate(replay(before, operations)):
        if done < last - 40 or done % 3:
            continue
        for tree in disk.after_power_loss(done):
            files = SimulatedFileSystem.after(tree)
            steps = found(files)
            save_and_note(files, Journal(JOURNAL, files), range(steps + 1, steps + 3))
            assert found(files) == steps + 2
            assert missing(files) == []
            states += 1
    assert states > 100


def test_without_a_sync_evidence_is_lost() -> None:
    before, operations = run(steps=2)
    kept = [each for each in operations if not (each.verb in SYNCS and each.path == str(JOURNAL))]
    assert len(kept) < len(operations)
    assert crashes_that_lose_evidence(before, kept) > 0
