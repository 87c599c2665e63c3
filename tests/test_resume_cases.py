"""Every situation of `docs/resume-cases.md` has tests, and each that is named there exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "resume-cases.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CASES = 26


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_named_test_exists() -> None:
    named = NAMED.findall(DOCUMENT)
    assert len(named) > CASES
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(file)]
    assert not missing


def test_every_case_and_every_reason_has_a_test() -> None:
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.splitlines() if "::" in line]
    tested = [row[0] for row in rows if NAMED.search(row[-1])]
    reasons = sorted(reason.value for reason in RolloutCheckpointAttemptReason)
    assert tested == [*map(str, range(1, CASES + 1)), *reasons]
