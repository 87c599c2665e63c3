"""What the commands print, line by line.

Rule kept here: names of files and tensors are others' words; whatever is in them, a terminal is
sent nothing but characters that it shows.
"""

from __future__ import annotations

import json
import re

_CONTROLS_IN_JSON = re.compile("[\x7f-\x9f]")
"""Those that `json` leaves as they are."""


def visible(text: str) -> str:
    """`text` with what is not shown as a character escaped as in Python, but for line ends."""
    return "\n".join(visible_line(line) for line in text.split("\n"))


def visible_line(text: str) -> str:
    """`text` as one line: what is not shown as a character is escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def say(line: str) -> None:
    """Print a line."""
    print(visible_line(line))


def say_json(value: object) -> None:
    """Print a document."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    print(_CONTROLS_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
