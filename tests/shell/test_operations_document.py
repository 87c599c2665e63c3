"""`docs/operations.md` speaks of every setting, metric and error that there is, and of no other."""

from __future__ import annotations

import re

from tests.shell.operations import ROOT, engine_options, errors, metrics, settings

DOCUMENT = (ROOT / "docs" / "operations.md").read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = DOCUMENT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names(title: str) -> list[str]:
    return [cells[0].strip("`") for cells in rows(title)]


def test_every_setting_is_there_with_its_default() -> None:
    written = {cells[0].strip("`"): cells[1].strip("`") for cells in rows("Settings")}
    assert written == settings()


def test_every_metric_is_there() -> None:
    assert set(names("Metrics")) == metrics()


def test_every_error_is_there_with_what_to_do() -> None:
    assert set(names("Errors")) == set(errors())
    assert all(len(cells) == 3 and all(cells) for cells in rows("Errors"))


def test_every_option_of_a_checkpoint_engine_is_there_with_its_default() -> None:
    written = {
        (backend, cells[0].strip("`")): cells[2].strip("`")
        for cells in rows("Options of the checkpoint engines")
        for backend in re.findall(r"`(\w+)`", cells[1])
    }
    assert written == engine_options()
