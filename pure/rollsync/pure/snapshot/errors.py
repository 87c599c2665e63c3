"""Why a run directory is refused, as values and in words.

Rule kept here: a message names the path and what to do.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct

from rollsync.pure.snapshot.lineage import LineageChanged, describe_change
from rollsync.pure.snapshot.selection import RefusedBundle


class OtherRun(Struct, frozen=True, kw_only=True):
    """The directory belongs to a run with other settings or another dataset."""

    directory: str
    change: LineageChanged


class NothingValid(Struct, frozen=True, kw_only=True):
    """There are bundles, and none can be taken."""

    directory: str
    refused: tuple[RefusedBundle, ...]
    """Newest first."""


class UnreadableDirectory(Struct, frozen=True, kw_only=True):
    """The run directory itself cannot be listed."""

    directory: str
    why: str


class FileSystemRefused(Struct, frozen=True, kw_only=True):
    """The file system lacks what a durable save needs."""

    directory: str
    lacks: str
    """The operation, and what happened."""


class DamagedBundleFile(Struct, frozen=True, kw_only=True):
    """A file or a segment of a bundle changed after the bundle was chosen."""

    path: str
    why: str


class UnsafeFileName(Struct, frozen=True, kw_only=True):
    """A file was put into a draft that a bundle may not have."""

    path: str
    why: str


class DirectoryInUse(Struct, frozen=True, kw_only=True):
    """Another process writes to the run directory."""

    directory: str


StoreRefusal = (
    OtherRun
    | NothingValid
    | UnreadableDirectory
    | FileSystemRefused
    | DamagedBundleFile
    | UnsafeFileName
    | DirectoryInUse
)


def describe_refusal(refusal: StoreRefusal) -> str:
    """What is wrong, in a line."""
    match refusal:
        case OtherRun(directory=directory, change=change):
            return f"{directory} belongs to another run: {describe_change(change)}"
        case NothingValid(directory=directory, refused=refused):
            reasons = "; ".join(f"{each.path}: {each.why}" for each in refused)
            return f"{directory}: none of {len(refused)} bundles can be resumed from: {reasons}"
        case UnreadableDirectory(directory=directory, why=why):
            return f"{directory} cannot be listed: {why}"
        case FileSystemRefused(directory=directory, lacks=lacks):
            return f"{directory} cannot hold a run: {lacks}"
        case DamagedBundleFile(path=path, why=why) | UnsafeFileName(path=path, why=why):
            return f"{path}: {why}"
        case DirectoryInUse(directory=directory):
            return f"another process writes to {directory}"
        case _:
            assert_never(refusal)


def remedy_for(refusal: StoreRefusal) -> str:
    """What the reader can do about it."""
    match refusal:
        case OtherRun():
            return "give this run a directory of its own, or put the settings named back"
        case NothingValid():
            return (
                "bring the files named back from a copy, or give the run an empty directory to "
                "start over"
            )
        case UnreadableDirectory():
            return "name a directory that is there and can be read"
        case FileSystemRefused():
            return "set run.directory to a directory that can"
        case DamagedBundleFile():
            return "start again: the bundle before it will be taken"
        case UnsafeFileName():
            return "write the trainer's files under other names"
        case DirectoryInUse():
            return "wait for that process to end, or stop it"
        case _:
            assert_never(refusal)
