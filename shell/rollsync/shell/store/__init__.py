"""The run directory, and the only code that touches it.

`SnapshotStore` is what saving and restoring use. Everything that is done to the disk goes through
`FileSystem`.
"""

from rollsync.shell.store.checkup import (
    BundleReport,
    Collected,
    RunReport,
    collect,
    examine,
    is_run_directory,
)
from rollsync.shell.store.chosen import Chosen, FoundBundle
from rollsync.shell.store.errors import StoreError
from rollsync.shell.store.filesystem import FileSystem, RealFileSystem
from rollsync.shell.store.store import SnapshotStore

__all__ = [
    "BundleReport",
    "Chosen",
    "Collected",
    "FileSystem",
    "FoundBundle",
    "RealFileSystem",
    "RunReport",
    "SnapshotStore",
    "StoreError",
    "collect",
    "examine",
    "is_run_directory",
]
