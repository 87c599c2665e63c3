"""No check of a refit is one that `python -O` leaves out.

The tests' own asserts stay: pytest rewrites them, and the conformance suite has none.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUITES = (
    "tests/shell/refit/test_synchronizer.py",
    "tests/shell/refit/test_refit_receiver.py",
    "tests/shell/refit/engines/test_conformance.py",
    "tests/shell/refit/engines/test_failures.py",
)


@pytest.mark.parametrize(
    "chosen",
    [
        "not nixl and not Nixl",
        pytest.param("nixl or Nixl", marks=pytest.mark.slow),
    ],
)
def test_the_suites_pass_when_python_optimizes(chosen: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen),
            # It warns of asserts outside of test modules.
            *("-W", "ignore::pytest.PytestConfigWarning"),
            *SUITES,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
