"""Every call of a save, a prune and a restore fails in turn: nothing is lost, the next one works.

The errors are those that disks and networks give: EIO, a full disk, an interrupted call, once or
from then on; a write that takes fewer bytes than it was given; a sync that fails and takes the data
with it; a rename that is done although it reports an error.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice, product

import pytest

from rollsync.shell.errors import RollsyncError
from rollsync.shell.store import SnapshotStore
from tests.crash.disk import Disk
from tests.crash.explore import Explorer
from tests.crash.operations import Fault, Operation, SimulatedFileSystem, Verb, no_fault
from tests.crash.scenario import (
    ROOT,
    RUN,
    found,
    leftovers,
    next_save,
    open_store,
    perform,
    prepared,
)

ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR)


def failing(position: int, number: int, *, for_ever: bool) -> Fault:
    """The call at `position` fails; with `for_ever`, all later ones too."""

    def fault(index: int, operation: Operation) -> OSError | int | None:
        if index == position or (for_ever and index > position):
            return OSError(number, os.strerror(number), operation.path)
        return None

    return fault


def short(position: int, taken: int, *, then_full: bool) -> Fault:
    """The write at `position` takes only some bytes; with `then_full`, the disk is full after."""

    def fault(index: int, operation: Operation) -> OSError | int | None:
        if index == position:
            return min(taken, len(operation.data))
        if then_full and index > position and operation.verb is Verb.WRITE:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)
        return None

    return fault


@dataclass
class Process:
    """A process that has resumed and is about to save."""

    files: SimulatedFileSystem
    store: SnapshotStore
    resumed: int


def resume(disk: Disk) -> Process:
    files = SimulatedFileSystem(deepcopy(disk))
    store = open_store(files)
    bundle = store.choose().bundle
    files.operations.clear()
    return Process(files, store, 0 if bundle is None else bundle.facts.mutation_version)


def disk_before(index: int) -> Disk:
    """The disk before save `index` (from 0)."""
    return prepared(index)[0].disk


def save_with(process: Process, index: int, fault: Fault) -> bool:
    """Save and prune while calls fail; whether the save was reported as published."""
    process.files.fault = fault
    try:
        perform(process.files, process.store, RUN[index])
    except (OSError, RollsyncError):
        return False
    else:
        with suppress(OSError):
            process.store.prune()
        return True
    finally:
        process.files.fault = no_fault


def check_after(process: Process, index: int, published: bool, at: str) -> None:
    """What a resume finds, and that the process goes on as if nothing had been."""
    files = process.files
    expected = index + 1 if published else index
    assert found(files) == expected, at
    save = next_save(expected)
    if not process.store.has_anchor(save.step):
        # A checkpoint whose name may not be durable has no snapshots from this process. The next
        # one makes the name durable first.
        assert published, at
        assert "sync directory" in at, at
        process = resume(files.disk)
        files = process.files
    perform(files, process.store, save)
    process.store.prune()
    assert found(files) == save.number, at
    assert not leftovers(files), at
    explorer = Explorer()
    for tree in islice(files.disk.after_power_loss(0), 10):
        explorer.check(tree, {save.number}, at)


def calls_of(index: int) -> list[Operation]:
    """Every call that the save and the prune make, also those that only look."""
    process = resume(disk_before(index))
    assert save_with(process, index, no_fault)
    return process.files.operations


def some_faults(position: int) -> list[tuple[int, bool]]:
    """One error once and one for ever; in turn all of them."""
    return [
        (ERRORS[position % len(ERRORS)], False),
        (ERRORS[(position + 1) % len(ERRORS)], True),
    ]


def all_faults(_: int) -> list[tuple[int, bool]]:
    return list(product(ERRORS, (False, True)))


@pytest.mark.parametrize(
    "faults_at", [some_faults, pytest.param(all_faults, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("index", range(len(RUN)))
def test_a_call_that_fails_loses_nothing_and_the_next_save_works(
    index: int, faults_at: Callable[[int], list[tuple[int, bool]]]
) -> None:
    disk = disk_before(index)
    outcomes: dict[bool, int] = {False: 0, True: 0}
    for position, operation in enumerate(calls_of(index)):
        for number, for_ever in faults_at(position):
            process = resume(disk)
            published = save_with(process, index, failing(position, number, for_ever=for_ever))
            outcomes[published] += 1
            at = f"{errno.errorcode[number]} at call {position}, {operation}, {for_ever=}"
            check_after(process, index, published, at)
    print(f"save {index + 1}: {outcomes[False]} failed, {outcomes[True]} were published")
    assert all(outcomes.values())


@pytest.mark.parametrize("index", range(len(RUN)))
def test_short_writes_are_no_errors_and_a_full_disk_is_one(index: int) -> None:
    disk = disk_before(index)
    writes = [
        (position, operation)
        for position, operation in enumerate(calls_of(index))
        if operation.verb is Verb.WRITE
    ]
    assert len(writes) >= 4
    for position, operation in writes:
        for taken in (1, len(operation.data) // 2):
            process = resume(disk)
            fault = short(position, taken, then_full=False)
            assert save_with(process, index, fault), str(operation)
            check_after(process, index, True, f"{operation} took {taken} bytes")
        process = resume(disk)
        assert not save_with(process, index, short(position, 1, then_full=True))
        check_after(process, index, False, f"the disk was full in {operation}")


@pytest.mark.parametrize("index", range(len(RUN)))
def test_a_rename_that_was_done_though_it_failed_is_believed_by_looking(index: int) -> None:
    disk = disk_before(index)
    renames = [
        position
        for position, operation in enumerate(calls_of(index))
        if operation.verb is Verb.RENAME
    ]
    assert renames
    for position in renames:
        process = resume(disk)

        def fault(index: int, operation: Operation, at: int = position) -> OSError | None:
            if index != at:
                return None
            operation.apply(process.files.disk)  # noqa: B023 (called before the next round)
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), operation.path)

        published = save_with(process, index, fault)
        check_after(process, index, published, f"rename at call {position}")


# Restoring.


def restores(*counts: int) -> Iterator[tuple[Disk, int]]:
    """Disks with so many saves, none of them pruned, and the newest."""
    for count in counts:
        files = SimulatedFileSystem.after({ROOT.parent.name: {}})
        store = open_store(files, keep=3)
        for save in RUN[:count]:
            perform(files, store, save)
            store.prune()
        yield files.disk, count


def test_a_restore_that_fails_anywhere_changes_nothing_and_works_the_next_time() -> None:
    tried = 0
    for disk, newest in restores(2, 4, 7):
        whole = SimulatedFileSystem(deepcopy(disk))
        assert found(whole) == newest
        for position, operation in enumerate(whole.operations):
            for number in (errno.EIO, errno.EINTR, errno.ESTALE):
                files = SimulatedFileSystem(deepcopy(disk))
                files.fault = failing(position, number, for_ever=False)
                try:
                    number_found = found(files)
                except (RollsyncError, OSError):
                    number_found = newest
                assert number_found in (newest, newest - 1, newest - 2), str(operation)
                assert not files.changes
                files.fault = no_fault
                assert found(files) == newest
                tried += 1
    print(f"{tried} failing restores")
    assert tried > 250


def test_choosing_takes_an_older_save_when_one_cannot_be_read() -> None:
    """Only the run directory itself has to be readable, where there is more than one anchor."""
    for disk, newest in restores(4, 7):
        process = SimulatedFileSystem(deepcopy(disk))
        open_store(process).choose()
        for position, operation in enumerate(process.operations):
            files = SimulatedFileSystem(deepcopy(disk))
            files.fault = failing(position, errno.EIO, for_ever=False)
            if operation.path == str(ROOT):
                with pytest.raises(RollsyncError, match=os.strerror(errno.EIO)):
                    open_store(files).choose()
                continue
            chosen = open_store(files).choose()
            assert chosen.bundle is not None, str(operation)
            taken = chosen.bundle.facts.mutation_version
            assert taken == newest or chosen.refused, str(operation)
