"""Where the commands print what they show as it happens."""

import os
import sys

from rich.console import Console


class CommandConsole(Console):
    """A console that goes quiet when its reader (head, less) has gone: the command goes on."""

    def on_broken_pipe(self) -> None:
        """Called by Rich, which would end the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
