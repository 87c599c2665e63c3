"""The store, and the commands that only look at a run directory, need the base package only."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys\n"
        "import rollsync.shell.store, rollsync.shell.cli.verify, rollsync.shell.cli.gc\n"
        "print(sorted({'torch', 'ray', 'vllm', 'numpy', 'asyncio'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
