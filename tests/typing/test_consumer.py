"""The types that a user sees: `consumer/` is checked against the wheel, outside the tree."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Installation

CONSUMER = Path(__file__).parent / "consumer"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy_cache")


def check(folder: Path, installation: "Installation", cache: Path) -> tuple[int, str]:
    """Runs mypy over a folder as the installation's user would, with their settings."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file=mypy.ini",
            f"--python-executable={installation.python}",
            f"--cache-dir={cache}",
            ".",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_consumer_type_checks(
    full_installation: "Installation", cache: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(CONSUMER, tmp_path / "consumer")
    code, answer = check(folder, full_installation, cache)
    assert code == 0, answer
    assert len(list(folder.glob("*.py"))) >= 1


WRONG = {
    "a wrong argument": "rollsync.shell.cli.main(3)  # expects a sequence of strings\n",
    "an ignore that is not needed": "rollsync.shell.cli.main([])  # type: ignore[arg-type]\n",
    "a name that is not there": "rollsync.shell.cli.nothing()\n",
    "a wrong assert_type": "assert_type(rollsync.shell.cli.main([]), str)\n",
}


@pytest.mark.parametrize("what", WRONG)
def test_the_check_can_fail(
    what: str, full_installation: "Installation", cache: Path, tmp_path: Path
) -> None:
    shutil.copy(CONSUMER / "mypy.ini", tmp_path)
    heading = "from typing import assert_type\nimport rollsync.shell.cli\n_ = assert_type\n"
    (tmp_path / "wrong.py").write_text(heading + WRONG[what])
    code, answer = check(tmp_path, full_installation, cache)
    assert code == 1, answer
    assert "wrong.py:4: error:" in answer


def test_without_the_wheel_there_are_no_types(
    full_installation: "Installation", tmp_path: Path
) -> None:
    # What is checked above is the wheel and not the tree.
    hidden = full_installation.site_packages / "rollsync"
    away = hidden.rename(tmp_path / "away")
    folder = tmp_path / "consumer"
    folder.mkdir()
    shutil.copy(CONSUMER / "mypy.ini", folder)
    (folder / "uses.py").write_text("import rollsync.shell.cli\n")
    try:
        code, answer = check(folder, full_installation, tmp_path / "cache")
    finally:
        away.rename(hidden)
    assert code == 1, answer
    assert "import-not-found" in answer
