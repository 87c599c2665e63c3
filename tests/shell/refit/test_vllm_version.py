"""Which releases of vLLM are taken, and that the others are refused by name, before anything else.

The vLLM of this test is a package that has nothing but a version: whatever is imported from it
besides fails otherwise than by the refusal.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
TAKEN = ("0.29.0", "0.30.1", "0.32.0", "0.32.9", "0.29.0rc1", "0.32.1.dev3+g1234")
REFUSED = ("0.28.0", "0.16.0", "0.33.0", "1.0.0", "0.1.0", "nightly")
REFUSAL = "is outside the supported range 0.29 to 0.32 (install vllm>=0.29,<=0.32.*)"
MODULES = ("vllm_calls", "vllm_gate", "vllm_loader", "vllm_transfer", "vllm_transfer_trainer")
"""All that import from vLLM, and with them the worker's extension."""

PROGRAM = """
import importlib, json, sys
import vllm
versions, modules = json.loads(sys.argv[1])
def said_to(name):
    sys.modules.pop(name, None)
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
said = {}
for vllm.__version__ in versions:
    said[vllm.__version__] = said_to("rollsync.shell.refit.vllm_version")
for name in modules:
    said[name] = said_to("rollsync.shell.refit." + name)
from rollsync.shell.refit import vllm_plugin
vllm_plugin.register()
print(json.dumps(said))
"""


def test_another_release_is_refused_by_name_before_anything_is_imported_from_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    path = [str(tmp_path), *(str(ROOT / room) for room in ("pure", "codecs", "shell"))]
    users = [*MODULES, "vllm_worker"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([[*TAKEN, *REFUSED], users])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    assert [said[version] for version in TAKEN] == [None] * len(TAKEN)
    for version in REFUSED:
        assert said[version] == f"UnsupportedVllm: vLLM {version} {REFUSAL}"
    for user in users:
        assert said[user] == f"UnsupportedVllm: vLLM {REFUSED[-1]} {REFUSAL}"
    # A plug-in's error would end engines that have nothing to do with rollsync.
    message = f"there is no weight-transfer backend 'rollsync': vLLM {REFUSED[-1]} {REFUSAL}"
    assert message in done.stderr


def test_the_modules_are_all_that_import_from_vllm() -> None:
    refit = ROOT / "shell" / "rollsync" / "shell" / "refit"
    importing = {
        path.stem
        for path in refit.glob("**/*.py")
        if any(line.startswith("from vllm") for line in path.read_text().splitlines())
    }
    assert importing == set(MODULES)


def test_the_range_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]["vllm"]
    (required,) = (r.specifier for r in map(Requirement, extras) if r.name == "vllm")
    assert [required.contains(f"0.{minor}.0") for minor in (28, 29, 32, 33)] == [
        False,
        True,
        True,
        False,
    ]
