"""`rollsync gc DIR`: removes from a run directory what retention does not keep.

Refuses while a run writes to the directory. Needs neither torch nor ray nor vllm.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rollsync.pure.config import RetentionConfig
from rollsync.shell.errors import RollsyncError
from rollsync.shell.store import RealFileSystem, collect

_KEPT = RetentionConfig()


class NotRemoved(RollsyncError):
    """Something that was to go is still there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `DIR`, `--dry-run` and how much stays."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run directory")
    parser.add_argument("--dry-run", action="store_true", help="only print what would go")
    parser.add_argument(
        "--trainer-checkpoints",
        type=_count,
        default=_KEPT.trainer_checkpoints,
        metavar="N",
        help="steps to keep (default: %(default)s)",
    )
    parser.add_argument(
        "--snapshots-per-checkpoint",
        type=_count,
        default=_KEPT.snapshots_per_checkpoint,
        metavar="N",
        help="snapshots to keep under each of them (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints what goes, one name a line."""
    directory: Path = args.directory
    dry_run: bool = args.dry_run
    limits = RetentionConfig(
        trainer_checkpoints=args.trainer_checkpoints,
        snapshots_per_checkpoint=args.snapshots_per_checkpoint,
    )
    try:
        collected = collect(directory, RealFileSystem(), limits, dry_run=dry_run)
    except OSError as error:
        raise NotRemoved(
            f"{error.filename or directory}: {error.strerror or error}",
            remedy="make it removable and run the command again; what else could go is gone",
        ) from error
    for name in collected.names:
        print(name)
    verb = "would free" if dry_run else "freed"
    print(f"{len(collected.names)} names, {verb} {collected.size_bytes} bytes")
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number
