"""The base package: installed without torch, ray and vllm, it decides, decodes and reads files."""

from typing import TYPE_CHECKING

from rollsync.shell.cli.registry import COMMANDS

if TYPE_CHECKING:
    from tests.conftest import Installation

IMPORT_ALL = """
import importlib, pkgutil
import rollsync.codecs, rollsync.pure
count = 0
for room in (rollsync.pure, rollsync.codecs):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
        count += 1
print(count)
"""

ENTRY_POINT = """
import sys
from importlib.metadata import entry_points
(rollsync,) = entry_points(group="console_scripts", name="rollsync")
sys.exit(rollsync.load()())
"""


def test_nothing_heavy_is_there(base_installation: "Installation") -> None:
    for name in ("torch", "ray", "vllm", "numpy"):
        done = base_installation.run("-c", f"import {name}")
        assert f"No module named '{name}'" in done.stderr


def test_the_wheel_holds_no_example(base_installation: "Installation") -> None:
    done = base_installation.run("-c", "import file_engine")
    assert "No module named 'file_engine'" in done.stderr
    assert not list(base_installation.site_packages.rglob("file_engine*"))


def test_rollsync_is_the_wheel(base_installation: "Installation") -> None:
    done = base_installation.run("-c", "import rollsync.pure; print(rollsync.pure.__file__)")
    assert done.stdout.startswith(str(base_installation.site_packages)), done.stderr


def test_every_pure_and_codecs_module_imports(base_installation: "Installation") -> None:
    done = base_installation.run("-W", "error", "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 6


def test_the_command_line_shows_its_help(base_installation: "Installation") -> None:
    done = base_installation.run("-c", ENTRY_POINT, "--help")
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command.name in done.stdout
        shown = base_installation.run("-c", ENTRY_POINT, command.name, "--help")
        assert shown.returncode == 0, shown.stderr
