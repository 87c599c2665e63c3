"""The rules of the rooms hold, and each tool that holds them can fail."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "ray", "vllm", "numpy", "transformers", "asyncio"}

# A planted line in a room, and the contract that must notice it.
VIOLATIONS = {
    "pure uses codecs": ("pure", "import rollsync.codecs", "The rooms"),
    "codecs use shell": ("codecs", "import rollsync.shell.errors", "The rooms"),
    "pure reads a clock": ("pure", "import time", "pure has no effects"),
    "pure imports torch": ("pure", "import torch", "pure has no effects"),
    "pure writes a file": ("pure", "from pathlib import Path", "pure has no effects"),
    "pure logs": ("pure", "import logging", "pure has no effects"),
    "codecs import torch": ("codecs", "import torch", "codecs have no effects"),
    "codecs import asyncio": ("codecs", "import asyncio", "codecs have no effects"),
}


def modules(room: str) -> list[str]:
    source = ROOT / room
    return sorted(
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in source.rglob("*.py")
    )


@pytest.mark.parametrize("room", ["pure", "codecs"])
def test_importing_every_module_brings_nothing_heavy(room: str) -> None:
    names = modules(room)
    code = (
        "import importlib, json, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "json.dump(sorted({name.partition('.')[0] for name in sys.modules}), sys.stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert len(names) > 3
    assert not loaded & HEAVY


def lint_imports(tree: Path) -> str:
    paths = [str(tree / room) for room in ("pure", "codecs", "shell")]
    code = (
        "import sys\n"
        f"sys.path[:0] = {paths!r}\n"
        "from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(config_filename='pyproject.toml', cache_dir=None))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for room in ("pure", "codecs", "shell"):
        shutil.copytree(ROOT / room, tmp_path / room)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold(tree: Path) -> None:
    assert ", 0 broken." in lint_imports(tree)


@pytest.mark.parametrize("what", VIOLATIONS)
def test_the_import_contracts_can_fail(what: str, tree: Path) -> None:
    room, line, contract = VIOLATIONS[what]
    planted = tree / room / "rollsync" / room / "planted.py"
    planted.write_text(f"{line}\n")
    answer = lint_imports(tree)
    broken = [line for line in answer.splitlines() if line.rstrip().endswith("BROKEN")]
    assert any(line.startswith(contract) for line in broken), answer


@pytest.mark.parametrize(
    "source",
    [
        "import time\n\nnow = time.monotonic()\n",
        "import random\n\nx = random.random()\n",
        "from datetime import datetime\n\nnow = datetime.now()\n",
        "from datetime import date\n\nnow = date.today()\n",
        "import secrets\n\nx = secrets.token_hex()\n",
        "import uuid\n\nx = uuid.uuid4()\n",
        "import os\n\nx = os.urandom(8)\n",
    ],
)
def test_ruff_bans_clocks_and_randomness_in_pure(source: str, tree: Path) -> None:
    planted = tree / "pure" / "rollsync" / "pure" / "planted.py"
    planted.write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", planted],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert "TID251" in done.stdout, done.stdout + done.stderr


def test_every_room_is_typed_and_none_hides_the_standard_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert rooms == ["pure", "codecs", "shell"]
    for room in rooms:
        assert (ROOT / room / "rollsync" / room / "py.typed").is_file()
        assert not (ROOT / room / "__init__.py").exists()
        assert not (ROOT / room / "rollsync" / "__init__.py").exists()
