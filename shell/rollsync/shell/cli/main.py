"""Parses the command line, runs one subcommand, and turns expected errors into exit codes.

Exit codes: 0 done, 1 the command's answer is "no", 2 the user can put it right, 3 a run lost its
trainer, engines or data plane and can be started again as it is, 130 interrupted.
"""

import argparse
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence

from rollsync.shell.cli._printing import visible
from rollsync.shell.cli.registry import COMMANDS, Command, CommandModule
from rollsync.shell.errors import RollsyncError

_EXTRA_OF_PACKAGE = {
    "nixl": "nixl",
    "numpy": "shell",
    "psutil": "shell",
    "ray": "shell",
    "reasoning_gym": "demo",
    "safetensors": "shell",
    "tensordict": "transferqueue",
    "tokenizers": "demo",
    "torch": "shell",
    "transfer_queue": "transferqueue",
    "transformers": "demo",
    "vllm": "vllm",
}


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Runs `rollsync` with the given arguments (default: those of the process).

    Returns the exit code. Arguments that do not parse, `--help` and `--version` end in
    `SystemExit`, as argparse does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        # The shell closed it (`>&-`).
        sys.stdout = open(_nowhere(), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A file name may have bytes that are no text in the terminal's encoding.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments, commands)
        finally:
            # Here, and not when Python ends, where nobody could handle what goes wrong with it.
            sys.stdout.flush()
    except RollsyncError as error:
        # The attributes and not str(): an error that came through a Ray call also derives from
        # Ray's own class, whose text is the remote traceback.
        return _refuse(error.message, error.remedy, error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF_PACKAGE:
            raise
        extra = _EXTRA_OF_PACKAGE[package]
        return _refuse(
            f"the package {package!r} is not installed",
            f"install it with: pip install 'rollsync[{extra}]'",
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone.
        _drop_output()
        return 0
    except OSError as error:
        # Whatever a file system refuses: a name too long, a file where a directory belongs.
        lines = str(error).splitlines()
        reason = error.strerror or (lines[0] if lines else type(error).__name__)
        where = f"{error.filename}: " if error.filename is not None else ""
        _drop_output()
        return _refuse(f"{where}{reason}", "put right what the message names, and try again")


def _run(arguments: list[str], commands: Sequence[Command]) -> int:
    parser = argparse.ArgumentParser(
        prog="rollsync",
        description="Keep an RL run's generation engines in step with its trainer, "
        "and its rollouts resumable.",
    )
    version = importlib.metadata.version("rollsync")
    parser.add_argument("--version", action="version", version=f"rollsync {version}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    chosen: CommandModule | None = None
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if arguments[:1] == [command.name]:
            chosen = command.load()
            chosen.add_arguments(subparser)
    args = parser.parse_args(arguments)
    if chosen is None:
        parser.print_help()
        return 2
    return chosen.run(args)


def _drop_output() -> None:
    """Let nothing more be written to where nothing can be: Python would complain at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(_nowhere(), sys.stdout.fileno())


def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def _refuse(message: str, remedy: str, exit_code: int = RollsyncError.exit_code) -> int:
    print(f"rollsync: {visible(message)}", file=sys.stderr)
    if remedy:
        print(f"  {visible(remedy)}", file=sys.stderr)
    return exit_code
