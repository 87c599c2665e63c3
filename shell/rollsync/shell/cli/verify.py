"""`rollsync verify DIR`: whether every file of a run directory is what its manifests say.

Reads only, and needs neither torch nor ray nor vllm. Exit code 1 when something is damaged.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rollsync.pure.snapshot.manifest import MANIFEST_FILE
from rollsync.shell.cli._printing import say, say_json
from rollsync.shell.config import read_config
from rollsync.shell.errors import RollsyncError
from rollsync.shell.journal import read_evidence, read_journal
from rollsync.shell.run.saved import CONFIG, CONFIG_IS_WRITTEN, JOURNAL, NoRunDirectory
from rollsync.shell.store import RealFileSystem, RunReport, examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `DIR` and `--json`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each bundle, in the order in which a resume would try them."""
    directory: Path = args.directory
    as_json: bool = args.json
    if (directory / MANIFEST_FILE).is_file():
        raise NoRunDirectory(
            f"{directory} is one bundle of a run, and shares segments with the others there",
            remedy="name the run directory, which holds segments/ too",
        )
    report = examine(directory, RealFileSystem())
    beside = _problems_beside(directory, has_saved=len(report.bundles) > 0)
    report = replace(report, problems=(*report.problems, *beside))
    if not (report.has_anchor or report.bundles or report.problems):
        raise NoRunDirectory(
            f"{directory}: no run has saved anything here",
            remedy="name the directory that run.directory names in the run's configuration",
        )
    if as_json:
        say_json(msgspec.to_builtins(report))
    else:
        for line in _lines(report):
            say(line)
    return 0 if report.is_whole else 1


def _problems_beside(directory: Path, *, has_saved: bool) -> Iterator[str]:
    """What is wrong with the files that no bundle needs, but people and `rollsync explain` do.
    Before the first save, a power failure can have left them in any state."""
    try:
        if (directory / CONFIG).is_file():
            read_config(directory / CONFIG)
        elif os.path.lexists(directory / CONFIG):
            yield f"{CONFIG} is no regular file"
        elif has_saved and os.path.lexists(directory / JOURNAL):
            # Whoever uses the store by itself has neither of them.
            yield (
                f"{CONFIG} is missing: a run resumes without, and `rollsync explain` does not; "
                + CONFIG_IS_WRITTEN
            )
    except RollsyncError as error:
        yield error.message
    try:
        for _ in (read_evidence if has_saved else read_journal)(directory / JOURNAL):
            pass
    except RollsyncError as error:
        yield error.message


def _lines(report: RunReport) -> Iterator[str]:
    width = max((len(bundle.path) for bundle in report.bundles), default=0)
    for bundle in report.bundles:
        if bundle.problem is None:
            what = (
                f"whole    {bundle.files} files, {bundle.segments} segments, "
                f"{bundle.size_bytes} bytes"
            )
        else:
            what = f"damaged  {bundle.problem}"
        yield f"{bundle.path:<{width}}  {what}"
    for problem in report.problems:
        yield f"problem: {problem}"
    for note in report.notes:
        yield f"note: {note}"
    damaged = sum(bundle.problem is not None for bundle in report.bundles)
    first = next((each.path for each in report.bundles if each.problem is None), None)
    yield (
        f"{len(report.bundles)} bundles, {damaged} damaged; "
        + (f"a resume takes {first}" if first is not None else "there is nothing to resume from")
    )
