"""What all tests share: no hub, no telemetry, no deadlines in Hypothesis, the installed wheel."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

for _name, _value in {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(_name, _value)

# No test fails for being slow. Where a change is judged, the same examples are tried each time.
_PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("default", _PATIENT)
hypothesis.settings.register_profile("ci", _PATIENT, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@dataclass(frozen=True)
class Installation:
    """An environment of its own, in which only the wheel is rollsync."""

    python: Path
    site_packages: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs its Python outside the tree, without what this process's environment adds."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=self.python.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree."""
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("rollsync-*.whl")
    return built


@pytest.fixture(scope="session")
def base_installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel with its required dependencies and nothing else, made without a network.

    The dependencies are links to this environment's copies, and theirs, as their metadata names
    them.
    """
    installation = _install(wheel, tmp_path_factory.mktemp("base"))
    (metadata,) = installation.site_packages.glob("rollsync-*.dist-info")
    required = importlib.metadata.Distribution.at(metadata).requires or ()
    for name in _closure(_requirements(required)):
        distribution = importlib.metadata.distribution(name)
        files = distribution.files
        assert files is not None, name
        tops = {file.parts[0] for file in files} - {"..", "__pycache__"}
        for top in sorted(tops):
            source = Path(str(distribution.locate_file(top)))
            (installation.site_packages / top).symlink_to(source)
    return installation


@pytest.fixture(scope="session")
def full_installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel, and all packages of this environment except the tree's own rollsync."""
    installation = _install(wheel, tmp_path_factory.mktemp("full"))
    # A folder named in a .pth file is searched, but its own .pth files (the editable
    # installation's among them) are not read.
    packages = Path(str(importlib.metadata.distribution("msgspec").locate_file("")))
    (installation.site_packages / "packages.pth").write_text(f"{packages}\n")
    return installation


def _install(wheel: Path, folder: Path) -> Installation:
    venv.create(folder, with_pip=False, symlinks=True)
    site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    return Installation(folder / "bin" / "python", site_packages)


def _requirements(texts: Iterable[str]) -> list[Requirement]:
    found = [Requirement(text) for text in texts]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def _closure(wanted: list[Requirement]) -> set[str]:
    names: set[str] = set()
    while wanted:
        name = wanted.pop().name
        if name not in names:
            names.add(name)
            wanted += _requirements(importlib.metadata.requires(name) or ())
    return names
