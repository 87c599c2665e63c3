"""A worker that stops answering; in a module that is quick to import for the process it is in."""

from __future__ import annotations

import os
import signal
from pathlib import Path


class HaltedWorker:
    """Leaves its process id in a file, and is halted as soon as it is asked for anything."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def holding(self) -> None:
        """A policy worker's first call."""
        self._halt()

    def start(self) -> None:
        """An engine's first call."""
        self._halt()

    def _halt(self) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(str(os.getpid()))
        draft.rename(self._file)
        os.kill(os.getpid(), signal.SIGSTOP)
