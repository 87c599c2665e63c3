"""`rollsync.shell.store` in someone else's program."""

from pathlib import Path
from typing import assert_type

from rollsync.pure.config import MasterConfig, RetentionConfig
from rollsync.pure.snapshot import StoreRefusal
from rollsync.shell.rollout.archive import ResumeArchive, SnapshotArchive
from rollsync.shell.store import (
    Chosen,
    Collected,
    FileSystem,
    FoundBundle,
    RealFileSystem,
    RunReport,
    SnapshotStore,
    StoreError,
    collect,
    examine,
)


def open_run(config: MasterConfig) -> tuple[SnapshotArchive, ResumeArchive]:
    store = SnapshotStore(Path("run"), config=config, dataset_digest="digest")
    SnapshotStore(Path("run"), config=config)  # type: ignore[call-arg]
    SnapshotStore("run", config=config, dataset_digest="digest")  # type: ignore[arg-type]
    return store, store


def resume(archive: ResumeArchive) -> bytes:
    try:
        chosen = archive.choose()
    except StoreError as error:
        assert_type(error.value, StoreRefusal)
        raise
    assert_type(chosen, Chosen)
    assert_type(chosen.bundle, FoundBundle | None)
    chosen.bundle.read("a")  # type: ignore[union-attr]
    return b"" if chosen.bundle is None else chosen.bundle.read("rollout_state.bin")


files: FileSystem = RealFileSystem()
assert_type(examine(Path("run"), files), RunReport)
assert_type(collect(Path("run"), files, RetentionConfig(), dry_run=True), Collected)
collect(Path("run"), files, RetentionConfig())  # type: ignore[call-arg]
