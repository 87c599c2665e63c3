"""Every refusal says which path it is about and what to do."""

from __future__ import annotations

import pytest

from rollsync.pure.snapshot.errors import (
    DamagedBundleFile,
    DirectoryInUse,
    FileSystemRefused,
    NothingValid,
    OtherRun,
    StoreRefusal,
    UnreadableDirectory,
    UnsafeFileName,
    describe_refusal,
    remedy_for,
)
from rollsync.pure.snapshot.lineage import ChangedSetting, LineageChanged
from rollsync.pure.snapshot.selection import RefusedBundle

CHANGED = ChangedSetting(path="run.seed", saved="0", current="7")
REFUSALS: tuple[tuple[StoreRefusal, str], ...] = (
    (
        OtherRun(directory="run", change=LineageChanged(changed=(CHANGED,))),
        "run belongs to another run: run.seed was 0, is now 7",
    ),
    (
        OtherRun(directory="run", change=LineageChanged(changed=())),
        "the anchor is unreadable",
    ),
    (
        NothingValid(
            directory="run",
            refused=(RefusedBundle(path="b", why="torn"), RefusedBundle(path="a", why="gone")),
        ),
        "run: none of 2 bundles can be resumed from: b: torn; a: gone",
    ),
    (UnreadableDirectory(directory="run", why="I/O error"), "run cannot be listed: I/O error"),
    (FileSystemRefused(directory="run", lacks="no rename"), "run cannot hold a run: no rename"),
    (DamagedBundleFile(path="run/a", why="changed"), "run/a: changed"),
    (UnsafeFileName(path="run/a", why="a link"), "run/a: a link"),
    (DirectoryInUse(directory="run"), "another process writes to run"),
)


@pytest.mark.parametrize(("refusal", "text"), REFUSALS)
def test_refusals_are_readable(refusal: StoreRefusal, text: str) -> None:
    assert text in describe_refusal(refusal)
    assert len(remedy_for(refusal)) > 10
