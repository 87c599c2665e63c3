"""The `rollsync` command: reads arguments, hands over to one module per subcommand.

Rule kept here: nothing is imported before it is needed. `rollsync --help` and the commands that
only read files work in an installation without torch, ray and vllm.

To add a command NAME:

1. write `rollsync/shell/cli/NAME.py` (`-` becomes `_`) with the two functions of
   `rollsync.shell.cli.registry.CommandModule`::

       def add_arguments(parser: argparse.ArgumentParser) -> None: ...
       def run(args: argparse.Namespace) -> int: ...

   `run` returns the exit code: 0 for done, 1 for a finished job whose answer is "no" (damage
   found, account not closed, states differ). It raises a `RollsyncError` for what the user can
   put right; that is printed as one line and its remedy, without a traceback, with exit code 2
   (or the error's own `exit_code`).
   Import torch, ray and vllm inside `run` or in modules that only `run` imports.
2. add a loader and a row to `rollsync.shell.cli.registry`; the help of the row is what
   `rollsync --help` shows. mypy checks the module's two functions through the loader.
3. test it through `main(["NAME", ...])`, and mention it in the README's table of commands.
"""

from rollsync.shell.cli.main import main

__all__ = ["main"]
