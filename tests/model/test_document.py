"""`docs/resume-correctness.md` names rules, functions and files that exist, and leaves none out."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from rollsync.pure.rollout import Rule

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "resume-correctness.md").read_text()
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
SYMBOLS = [
    each
    for each in QUOTED
    if re.fullmatch(r"_?[a-z_]+(\.[A-Za-z_]+)+", each) and not each.startswith("rollsync.")
]
FILES = [each for each in QUOTED if each.startswith("tests/")]


def test_every_rule_is_in_the_table() -> None:
    table = re.findall(r"^\| `([a-z_]+)` \|", TEXT, re.MULTILINE)
    assert table == [rule.value for rule in Rule]


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_named_function_exists(symbol: str) -> None:
    module, *names = symbol.split(".")
    found: object = importlib.import_module(f"rollsync.pure.rollout.{module}")
    for name in names:
        found = getattr(found, name)
    assert found is not None


@pytest.mark.parametrize("file", FILES)
def test_a_named_file_exists(file: str) -> None:
    assert (ROOT / file).exists()


def test_the_document_names_code() -> None:
    assert len(SYMBOLS) > 25
    assert len(FILES) >= 5
