"""`rollsync run CONFIG`: one process's part of a run; it resumes what the run directory holds."""

from __future__ import annotations

import argparse
from pathlib import Path

_GOES_ON = {
    True: "The same command goes on from here.",
    False: "The same command goes on from the save before.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration file, and the cluster to run it on."""
    parser.add_argument("config", type=Path, help="YAML file; `rollsync demo` writes one to copy")
    parser.add_argument(
        "--address",
        help="Ray cluster to run on, as host:port or auto: in place of cluster.address",
    )


def run(args: argparse.Namespace) -> int:
    """Run until the steps are trained, or until asked to stop; 1 when that could not be saved."""
    from rollsync.shell.cli._console import CommandConsole
    from rollsync.shell.cli._settings import read_settings
    from rollsync.shell.run.display import RunDisplay

    config = read_settings(args)
    console = CommandConsole()
    with RunDisplay(console, title=str(args.config)) as display:
        # Imported late: torch, Ray and transformers take seconds, and a wrong file should not.
        from rollsync.shell.run.launch import run_config

        outcome = run_config(config, listener=display.listener)
    if not outcome.completed:
        console.print(f"Stopped: {outcome.why}. {_GOES_ON[outcome.saved]}")
    return 0 if outcome.saved else 1
