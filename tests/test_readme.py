"""The README's Python runs as it stands, and its types hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollsync.shell.cli.registry import COMMANDS

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def sections() -> dict[str, str]:
    """Heading of level two -> its Python blocks, which continue one another."""
    found: dict[str, str] = {}
    for part in re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        blocks = _BLOCK.findall(body)
        if blocks:
            found[heading] = "\n".join(blocks)
    return found


SECTIONS = sections()


def test_the_readme_shows_code() -> None:
    assert SECTIONS


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_code_of_a_section_runs(heading: str, tmp_path: Path) -> None:
    script = tmp_path / "section.py"
    script.write_text(SECTIONS[heading])
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_type_checks(tmp_path: Path) -> None:
    for number, code in enumerate(SECTIONS.values(), 1):
        (tmp_path / f"readme_{number}.py").write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            f"--config-file={ROOT / 'pyproject.toml'}",
            f"--cache-dir={tmp_path / 'cache'}",
            *map(str, sorted(tmp_path.glob("*.py"))),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_relative_links_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = []
    for document in documents:
        text = document.read_text()
        targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text)
        targets += re.findall(r"`((?:docs/)[\w./-]+\.md|[A-Z]+\.md)`", text)
        broken += [
            f"{document.name}: {target}"
            for target in targets
            if not (document.parent / target).exists() and not (ROOT / target).exists()
        ]
    assert not broken


def test_every_command_is_in_the_table() -> None:
    text = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"| `rollsync {command.name}" in text, command.name
