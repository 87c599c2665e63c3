"""What CONTRIBUTING.md says where to look is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
WHERE_TO_LOOK = _GUIDE.partition("## Where to look\n")[2].partition("\n## ")[0]
MODULES = sorted(set(re.findall(r"`((?:pure|shell)\.[a-z_.]+)`", WHERE_TO_LOOK)))
PLACES = [
    (name, module)
    for names, module in re.findall(
        r"((?:`\w+`(?:, | and )?)+) in `((?:pure|shell)\.[a-z_.]+)`", WHERE_TO_LOOK
    )
    for name in re.findall(r"`(\w+)`", names)
]
"""What is said to be in which module."""


def source_of(module: str) -> Path:
    """The file, or the folder, of a module without `rollsync.`."""
    room = module.partition(".")[0]
    path = ROOT / room / "rollsync" / module.replace(".", "/")
    return path if path.is_dir() else path.with_suffix(".py")


def test_the_guide_is_read() -> None:
    assert ("plan_routes", "pure.refit.routes") in PLACES
    assert "shell.store" in MODULES


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_is_named_exists(module: str) -> None:
    assert source_of(module).exists()


@pytest.mark.parametrize(("name", "module"), PLACES)
def test_what_is_said_to_be_in_a_module_is_defined_there(name: str, module: str) -> None:
    assert re.search(
        rf"^\s*(?:async def|def|class) {name}\b", source_of(module).read_text(), re.MULTILINE
    )


def test_every_other_name_is_that_of_a_module_or_of_something_public() -> None:
    """Short names of modules, classes and their methods."""
    known = {path.stem for path in (ROOT / "shell").rglob("*.py")}
    known |= {path.stem for path in (ROOT / "pure").rglob("*.py")}
    sources = "".join(path.read_text() for path in (ROOT / "shell").rglob("*.py"))
    known |= set(re.findall(r"^ *(?:async def|def|class) (\w+)", sources, re.MULTILINE))
    placed = {name for name, _ in PLACES} | {"refit_timeout_s"}
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", WHERE_TO_LOOK)) - set(MODULES) - placed
    assert [each for each in sorted(named) if not set(each.split(".")) <= known] == []
