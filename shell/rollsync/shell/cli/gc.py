"""`rollsync gc DIR`: removes from a run directory what retention does not keep.

Rule kept here: nothing goes that the run itself keeps, unless the command line says how much is to
stay: the limits are those of the run's configuration, and there are no others to fall back on.
Refuses while a run writes to the directory. Needs neither torch nor ray nor vllm.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rollsync.pure.config import RetentionConfig
from rollsync.shell.cli._printing import say
from rollsync.shell.config import ConfigError, read_config
from rollsync.shell.errors import RollsyncError
from rollsync.shell.run.saved import CONFIG, CONFIG_IS_WRITTEN, NoRunDirectory
from rollsync.shell.store import RealFileSystem, collect, is_run_directory

_REMEDY = (
    "give both --trainer-checkpoints and --snapshots-per-checkpoint, or put the file back: "
    + CONFIG_IS_WRITTEN
)


class NotRemoved(RollsyncError):
    """Something that was to go is still there."""


class RetentionUnknown(RollsyncError):
    """How much a run keeps can be read nowhere. Nothing was removed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `DIR`, `--dry-run` and how much stays."""
    parser.description = (
        "Remove from a run directory what retention does not keep: checkpointing.retention of the "
        f"run's configuration, as {CONFIG} in the directory has it, where no option below says "
        f"otherwise. Without a readable {CONFIG}, both options have to be given."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run directory")
    parser.add_argument("--dry-run", action="store_true", help="only print what would go")
    parser.add_argument(
        "--trainer-checkpoints",
        type=_count,
        metavar="N",
        help=f"steps to keep (default: what {CONFIG} says)",
    )
    parser.add_argument(
        "--snapshots-per-checkpoint",
        type=_count,
        metavar="N",
        help=f"snapshots to keep under each of them (default: what {CONFIG} says)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints how much stays, and what goes, one name a line."""
    directory: Path = args.directory
    dry_run: bool = args.dry_run
    fs = RealFileSystem()
    if not is_run_directory(directory, fs):
        raise NoRunDirectory(
            f"{directory}: no run has saved anything here",
            remedy="name the directory that run.directory names in the run's configuration",
        )
    limits = _limits(directory, args.trainer_checkpoints, args.snapshots_per_checkpoint)
    try:
        collected = collect(directory, fs, limits, dry_run=dry_run)
    except OSError as error:
        raise NotRemoved(
            f"{error.filename or directory}: {error.strerror or error}",
            remedy="make it removable and run the command again; what else could go is gone",
        ) from error
    for name in collected.names:
        say(name)
    verb = "would free" if dry_run else "freed"
    say(f"{len(collected.names)} names, {verb} {collected.size_bytes} bytes")
    return 0


def _limits(directory: Path, checkpoints: int | None, snapshots: int | None) -> RetentionConfig:
    """What is asked for, else what the run keeps; printed, with where each is from."""
    if checkpoints is not None and snapshots is not None:
        limits = RetentionConfig(
            trainer_checkpoints=checkpoints, snapshots_per_checkpoint=snapshots
        )
    else:
        kept = _retention_of(directory)
        limits = RetentionConfig(
            trainer_checkpoints=checkpoints or kept.trainer_checkpoints,
            snapshots_per_checkpoint=snapshots or kept.snapshots_per_checkpoint,
        )
    say(
        f"retention: trainer_checkpoints {limits.trainer_checkpoints} ({_source(checkpoints)}), "
        f"snapshots_per_checkpoint {limits.snapshots_per_checkpoint} ({_source(snapshots)})"
    )
    return limits


def _retention_of(directory: Path) -> RetentionConfig:
    config = directory / CONFIG
    if not config.is_file():  # A pipe would be waited for.
        raise RetentionUnknown(
            f"how much the run keeps is not known: {directory} has no {CONFIG}", remedy=_REMEDY
        )
    try:
        return read_config(config).checkpointing.retention
    except ConfigError as error:
        raise RetentionUnknown(
            f"how much the run keeps is not known: {error.message}", remedy=_REMEDY
        ) from error


def _source(asked: int | None) -> str:
    return CONFIG if asked is None else "command line"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
