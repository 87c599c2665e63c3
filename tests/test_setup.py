"""Setting up: once, again when a list changes, never half, and with a clear word when it cannot."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FAKE_PYTHONS = {
    "none": "",
    "too old": "#!/bin/sh\nexit 1\n",
    "without venv": '#!/bin/sh\ncase "$2" in *version_info*) exit 0 ;; *) exit 1 ;; esac\n',
    "good": "#!/bin/sh\nexit 0\n",
}
ANSWERS = {
    "none": "Python 3.11 or newer is needed",
    "too old": "Python 3.11 or newer is needed",
    "without venv": "apt install python3.11-venv",
    "good": "python3.11\n",
}


@pytest.mark.parametrize("what", FAKE_PYTHONS)
def test_a_python_is_found_or_its_absence_explained(what: str, tmp_path: Path) -> None:
    if FAKE_PYTHONS[what]:
        fake = tmp_path / "python3.11"
        fake.write_text(FAKE_PYTHONS[what])
        fake.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "requirements" / "find-python.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ANSWERS[what] in done.stdout + done.stderr
    assert (done.returncode == 0) == (what == "good")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that set-up looks at, with a complete environment that is newer than they."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for path in tmp_path.rglob("*"):
        os.utime(path, (1000, 1000))
    (tmp_path / ".venv").mkdir()
    for age, stamp in ((2000, ".packages"), (3000, ".ready")):
        path = tmp_path / ".venv" / stamp
        path.touch()
        os.utime(path, (age, age))
    return tmp_path


def would_run(tree: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "--dry-run", "setup"], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_call_sets_nothing_up(tree: Path) -> None:
    assert "pip" not in would_run(tree)


def test_a_changed_list_makes_the_environment_anew(tree: Path) -> None:
    os.utime(tree / "requirements" / "cpu.txt", (4000, 4000))
    commands = would_run(tree)
    assert "-m venv --clear" in commands
    assert "--editable" in commands


def test_a_changed_project_file_installs_rollsync_again(tree: Path) -> None:
    os.utime(tree / "pyproject.toml", (4000, 4000))
    commands = would_run(tree)
    assert "-m venv --clear" not in commands
    assert "--editable" in commands


def test_an_interrupted_set_up_starts_over(tree: Path) -> None:
    (tree / ".venv" / ".packages").unlink()
    (tree / ".venv" / ".ready").unlink()
    assert "-m venv --clear" in would_run(tree)
