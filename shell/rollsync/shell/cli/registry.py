"""The table of subcommands.

Rule kept here: a row costs no import; a command's module is loaded only when it is chosen.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class CommandModule(Protocol):
    """What a subcommand's module defines."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's own arguments on its parser."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the job and returns the exit code."""


@dataclass(frozen=True)
class Command:
    """One row: the name on the command line, one line of help, and how to get the module."""

    name: str
    help: str
    load: Callable[[], CommandModule]


def _inspect() -> CommandModule:
    from rollsync.shell.cli import inspect

    return inspect


def _diff() -> CommandModule:
    from rollsync.shell.cli import diff

    return diff


def _plan() -> CommandModule:
    from rollsync.shell.cli import plan

    return plan


def _verify() -> CommandModule:
    from rollsync.shell.cli import verify

    return verify


def _gc() -> CommandModule:
    from rollsync.shell.cli import gc

    return gc


def _run() -> CommandModule:
    from rollsync.shell.cli import run

    return run


def _check_cluster() -> CommandModule:
    from rollsync.shell.cli import check_cluster

    return check_cluster


def _demo() -> CommandModule:
    from rollsync.shell.cli import demo

    return demo


def _explain() -> CommandModule:
    from rollsync.shell.cli import explain

    return explain


COMMANDS: tuple[Command, ...] = (
    Command("demo", "train a small model, kill the run, resume it, and prove the account", _demo),
    Command("run", "run a configuration, or go on with the run in its directory", _run),
    Command(
        "check-cluster", "try a refit with made-up weights, and time each route", _check_cluster
    ),
    Command("plan", "what a refit will move, hold and take, from a model's shapes", _plan),
    Command("explain", "say what a resume of a run directory would do, group by group", _explain),
    Command("inspect", "print what is in a rollsync file, or in a directory of them", _inspect),
    Command("diff", "print where two rollsync files of one kind, or two snapshots, differ", _diff),
    Command("verify", "check every file of a run directory", _verify),
    Command("gc", "remove from a run directory what retention does not keep", _gc),
)
