"""What the commands print is what a terminal shows, whatever names have in them."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from rollsync.shell.cli._console import CommandConsole
from rollsync.shell.cli._printing import say_json, visible, visible_line


@given(st.text())
def test_a_line_has_only_what_is_shown(text: str) -> None:
    assert visible_line(text).isprintable()
    assert visible(text).count("\n") == text.count("\n")


@given(st.text().filter(str.isprintable))
def test_what_is_shown_stays_as_it_is(text: str) -> None:
    assert visible_line(text) == text


def test_a_document_stays_the_same_document(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"\x1b[31m": "\x9b\x7f\nä\u2028"}
    say_json(document)
    out = capsys.readouterr().out
    assert json.loads(out) == document
    assert not {"\x1b", "\x9b", "\x7f"} & set(out)


def test_a_console_shows_brackets_and_escapes_controls_wherever_they_are() -> None:
    file = io.StringIO()
    console = CommandConsole(file=file, width=100)
    name = "[/x][red]w:smile:\x1b[31m"
    table = Table(title=f"title {name}", caption=f"caption {name}")
    table.add_column(f"column {name}")
    table.add_row(f"row {name}")
    console.print(table)
    console.print(f"line {name}")
    for place in ("title", "caption", "column", "row", "line"):
        assert f"{place} [/x][red]w:smile:\\x1b[31m" in file.getvalue()
    assert "\x1b" not in file.getvalue()
