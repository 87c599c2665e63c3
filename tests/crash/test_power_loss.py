"""Power is lost after any operation of a save and its prune: a resume finds it or the one before.

What is written but not durable is kept, dropped, torn or garbage; names are there or not, in any
combination. The states are counted and printed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest

from rollsync.shell.store import SnapshotStore
from rollsync.shell.store.filesystem import PROBE_NAME
from tests.crash.disk import Disk
from tests.crash.explore import Explorer, Lost, recorded, snapshot
from tests.crash.operations import SYNCS, Operation, SimulatedFileSystem, Verb, replay
from tests.crash.scenario import (
    NOTHING,
    RUN,
    found,
    leftovers,
    next_save,
    open_store,
    perform,
    prepared,
)


@dataclass(frozen=True)
class Recording:
    """One save of the run and the prune after it, as operations."""

    before: Disk
    operations: tuple[Operation, ...]
    committed_after: int
    """Operations of the save; the others are the prune's."""
    allowed: frozenset[int]
    committed: int

    def explore(self, explorer: Explorer, points: Collection[int] | None = None) -> None:
        """Crash after each operation, or at some points."""
        explorer.crash_everywhere(
            self.before,
            list(self.operations),
            points=range(len(self.operations) + 1) if points is None else points,
            allowed=set(self.allowed),
            committed=self.committed,
            committed_after=self.committed_after,
        )


def record(index: int) -> Recording:
    """Save `index` of the run (from 0), and its prune."""
    files, store = prepared(index)
    return record_save(files, store, index, allowed={index, index + 1})


def record_after_kill(index: int) -> Recording:
    """The same by another process: the one that made the save before was killed when that had its
    name, and had not made it durable."""
    before = record(index - 1)
    files = SimulatedFileSystem(after(before, before.committed_after - 1))
    assert before.operations[before.committed_after - 1].verb is Verb.SYNC_DIRECTORY
    return record_save(
        files, open_store(files), index, allowed={max(NOTHING, index - 1), index, index + 1}
    )


def record_save(
    files: SimulatedFileSystem, store: SnapshotStore, index: int, *, allowed: set[int]
) -> Recording:
    before, since = snapshot(files), len(files.operations)
    perform(files, store, RUN[index])
    saved = len(recorded(files, since))
    store.prune()
    return Recording(
        before=before,
        operations=tuple(recorded(files, since)),
        committed_after=saved,
        allowed=frozenset(allowed),
        committed=index + 1,
    )


@pytest.mark.parametrize("index", range(len(RUN)))
def test_a_resume_finds_the_save_or_the_one_before(index: int) -> None:
    explorer = Explorer()
    record(index).explore(explorer)
    print(f"save {index + 1}: {explorer.count}; found {dict(explorer.count.found)}")
    assert explorer.count.states > 500
    assert set(explorer.count.found) == {index, index + 1}


@pytest.mark.parametrize("index", range(len(RUN)))
def test_a_process_that_died_and_came_again_saves_as_durably(index: int) -> None:
    """Killed anywhere in a save, resumed on the same machine, saved; and then power is lost."""
    recording = record(index)
    explorer = Explorer()
    for done in range(0, len(recording.operations) + 1, 2):
        files = SimulatedFileSystem(after(recording, done))
        resumed = found(files)
        assert resumed in (index, index + 1)
        store = open_store(files)
        save = next_save(resumed)
        before, since = snapshot(files), len(files.operations)
        perform(files, store, save)
        saved = len(recorded(files, since))
        store.prune()
        operations = recorded(files, since)
        at = f"killed after {done} operations, saved again"
        for when in (saved, len(operations)):
            for tree in after_operations(before, operations[:when]).after_power_loss(done):
                explorer.check(tree, {save.number}, at)
        assert not leftovers(files)
    print(f"save {index + 1}, killed and saved again: {explorer.count}")


def after(recording: Recording, done: int) -> Disk:
    return after_operations(recording.before, list(recording.operations[:done]))


def after_operations(before: Disk, operations: list[Operation]) -> Disk:
    """A disk of its own, after some operations."""
    *_, disk = replay(before, operations)
    return disk


# What would go wrong without each rule: the exploration has to notice.


def without(recording: Recording, left_out: list[int]) -> Recording:
    """The recording with some operations left out."""
    return replace(
        recording,
        operations=tuple(
            operation
            for position, operation in enumerate(recording.operations)
            if position not in left_out
        ),
        committed_after=recording.committed_after
        - sum(position < recording.committed_after for position in left_out),
    )


def earlier(recording: Recording, position: int) -> Recording:
    """The recording with an operation done before the one that it followed."""
    moved = list(recording.operations)
    moved.insert(position - 1, moved.pop(position))
    return replace(recording, operations=tuple(moved))


def is_noticed(mutant: Recording, position: int, explorer: Explorer) -> bool:
    """Whether the exploration fails. Before `position` the mutant is like the original; right
    after the save and after the prune most mistakes show."""
    end = len(mutant.operations)
    try:
        mutant.explore(explorer, {mutant.committed_after, end})
        mutant.explore(explorer, range(position, end))
    except Lost:
        return True
    except OSError:
        return True  # It cannot even be done in this order.
    return False


def positions(recording: Recording, verbs: frozenset[Verb]) -> list[int]:
    return [
        index
        for index, operation in enumerate(recording.operations)
        if operation.verb in verbs and PROBE_NAME not in operation.path
    ]


@pytest.mark.parametrize("index", range(len(RUN)))
def test_never_syncing_one_thing_is_noticed(index: int) -> None:
    """A directory that is synced twice in a save could do with the later one, so all syncs of one
    path are left out at once; those of the save and those of the prune on their own. Some are only
    of use when the process before was killed."""
    recording = record(index)
    things = synced_things(recording)
    assert len(things) > 5
    unnoticed = can_be_left_out(recording, things)
    if unnoticed and index:
        unnoticed = can_be_left_out(record_after_kill(index), unnoticed)
    assert not unnoticed


Thing = tuple[str, str]
"""A path, and whether the save or the prune syncs it."""


def synced_things(recording: Recording) -> dict[Thing, list[int]]:
    """Positions of the syncs of each."""
    things: dict[Thing, list[int]] = {}
    for position in positions(recording, SYNCS):
        phase = "save" if position < recording.committed_after else "prune"
        things.setdefault((recording.operations[position].path, phase), []).append(position)
    return things


def can_be_left_out(recording: Recording, things: Collection[Thing]) -> set[Thing]:
    """Those whose syncs can be left out, and nothing is noticed."""
    explorer = Explorer()
    return {
        thing
        for thing, at in synced_things(recording).items()
        if thing in things and not is_noticed(without(recording, at), at[0], explorer)
    }


@pytest.mark.parametrize("index", range(len(RUN)))
def test_renaming_too_early_is_noticed(index: int) -> None:
    recording, explorer = record(index), Explorer()
    renames = positions(recording, frozenset({Verb.RENAME}))
    assert renames
    unnoticed = [
        str(recording.operations[position])
        for position in renames
        if not is_noticed(earlier(recording, position), position - 1, explorer)
    ]
    assert not unnoticed
