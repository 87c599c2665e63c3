"""Where the commands print what they show as it happens."""

import os
import sys
from typing import IO

from rich.console import Console, HighlighterType, JustifyMethod, OverflowMethod
from rich.style import Style
from rich.text import Text

from rollsync.shell.cli._printing import visible


class CommandConsole(Console):
    """A console that shows text as it is, brackets too, and goes quiet when its reader (head,
    less) has gone: the command goes on.

    Args:
        file: where to; the standard output if None.
        width: in columns; the terminal's if None.
        highlight: whether numbers and paths are coloured.
    """

    def __init__(
        self, *, file: IO[str] | None = None, width: int | None = None, highlight: bool = True
    ) -> None:
        super().__init__(file=file, width=width, highlight=highlight, markup=False, emoji=False)

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        emoji: bool | None = None,
        markup: bool | None = None,
        highlight: bool | None = None,
        highlighter: HighlighterType | None = None,
    ) -> Text:
        """Called by Rich for all text that is shown: here nothing else gets to the terminal."""
        return super().render_str(
            visible(text),
            style=style,
            justify=justify,
            overflow=overflow,
            emoji=emoji,
            markup=markup,
            highlight=highlight,
            highlighter=highlighter,
        )

    def on_broken_pipe(self) -> None:
        """Called by Rich, which would end the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
