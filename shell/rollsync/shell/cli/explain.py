"""`rollsync explain DIR`: what a resume of a run directory would do, group by group."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run directory."""
    parser.add_argument("directory", type=Path, help="run directory, the original or a copy")


def run(args: argparse.Namespace) -> int:
    """Print the plan; nothing is changed."""
    from rollsync.pure.rollout.explain import explain
    from rollsync.shell.cli._printing import say
    from rollsync.shell.run.saved import read_saved

    saved = read_saved(args.directory)
    for refused in saved.refused:
        say(f"passed over {refused}")
    say(f"from {saved.bundle.path}")
    for line in explain(saved.plan()):
        say(line)
    return 0
