"""Says at the end of a test run how many states of a disk were looked at."""

from __future__ import annotations

import pytest

from tests.crash.explore import TOTAL


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TOTAL.states:
        terminalreporter.write_line(f"crashes of the store: {TOTAL}")
