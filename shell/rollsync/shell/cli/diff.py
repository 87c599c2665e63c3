"""`rollsync diff A B`: where two files of one kind, or the states of two snapshots, differ.

States are compared in the terms of a run (what became of which group), other kinds place by place;
`--json` is place by place for all. Reads only, and needs neither torch nor ray nor vllm. Exit code
1 when the two differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from rollsync.codecs.view import Change, changes, view
from rollsync.pure.rollout.diff import diff, diff_lines
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.cli._printing import say, say_json
from rollsync.shell.errors import RollsyncError
from rollsync.shell.files import read_state, read_value

_SHOWN_CHARACTERS = 100


class DifferentKinds(RollsyncError):
    """The two files hold values of different kinds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `A`, `B` and `--json`."""
    parser.add_argument("before", type=Path, metavar="A", help="a file, or a snapshot directory")
    parser.add_argument("after", type=Path, metavar="B", help="the same to compare with")
    parser.add_argument("--json", action="store_true", help="print whole values, as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints one line for each place that differs."""
    before_path: Path = args.before
    after_path: Path = args.after
    as_json: bool = args.json
    before = _value(before_path)
    after = _value(after_path)
    if type(before) is not type(after):
        raise DifferentKinds(
            f"{before_path} holds a {type(before).__name__}, {after_path} a {type(after).__name__}",
            remedy="name two files of one kind",
        )
    found = list(changes(view(before), view(after)))
    if as_json:
        say_json(msgspec.to_builtins(found))
    elif isinstance(before, RolloutState) and isinstance(after, RolloutState):
        for line in diff_lines(diff(before, after)):
            say(line)
    else:
        for change in found:
            say(_line(change))
    return 1 if found else 0


def _value(path: Path) -> object:
    return read_state(path) if path.is_dir() else read_value(path)


def _line(change: Change) -> str:
    path = ".".join(str(part) for part in change.path)
    if change.before is msgspec.UNSET:
        return f"+ {path}: {_short(change.after)}"
    if change.after is msgspec.UNSET:
        return f"- {path}: {_short(change.before)}"
    return f"~ {path}: {_short(change.before)} -> {_short(change.after)}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
