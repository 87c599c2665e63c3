"""Every test that docs/refit-cases.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`([\w./]+)::(test_\w+)`")
CASES = 25


def test_each_case_names_tests_that_exist() -> None:
    rows = [
        line
        for line in (ROOT / "docs/refit-cases.md").read_text().splitlines()
        if NAMED.search(line)
    ]
    assert len(rows) == CASES
    for row in rows:
        for where, name in NAMED.findall(row):
            file = where if where.endswith(".py") else f"shell/{where.replace('.', '/')}.py"
            assert f"def {name}(" in (ROOT / file).read_text(), (where, name)
