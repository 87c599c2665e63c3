"""Which releases of vLLM are taken, and that the others are refused by name, at the start.

vLLM is imported in a process of its own, where its warnings are no errors.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
TAKEN = ("0.16.0", "0.25.1", "0.32.0", "0.33.9", "0.16.0rc1", "0.33.1.dev3+g1234")
REFUSED = ("0.15.9", "0.34.0", "1.0.0", "0.1.0", "nightly")

CHECK_EACH = """
import json, sys
from rollsync.shell.refit.errors import UnsupportedVllm
from rollsync.shell.refit.vllm_loader import check_vllm_version
check_vllm_version()
said = {}
for version in json.loads(sys.argv[1]):
    try:
        check_vllm_version(version)
    except UnsupportedVllm as error:
        said[version] = str(error)
print(json.dumps(said))
"""

START_EACH = """
from rollsync.shell.refit import vllm_calls, vllm_transfer, vllm_worker
from rollsync.shell.refit.errors import UnsupportedVllm
def refuse():
    raise UnsupportedVllm("vLLM 0.99.0 is outside the supported range")
for module in (vllm_calls, vllm_transfer, vllm_worker):
    module.check_vllm_version = refuse
for start in (
    lambda: vllm_calls.start_async("model", {}),
    lambda: vllm_calls.start_sync("model", {}),
    lambda: vllm_worker.RefitWorkerExtension().prepare_checkpoint_engine(),
    lambda: vllm_transfer.RollsyncWeightTransferEngine(None, None, None, None),
):
    try:
        start()
    except UnsupportedVllm:
        print("refused")
"""


def last_lines(program: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_releases_outside_the_range_are_refused_by_name_and_the_installed_one_is_not() -> None:
    *_, answer = last_lines(CHECK_EACH, json.dumps([*TAKEN, *REFUSED]))
    said = json.loads(answer)
    assert list(said) == list(REFUSED)
    for version, message in said.items():
        assert f"vLLM {version} is outside the supported range 0.16 to 0.33" in message
        assert "install vllm" in message


def test_the_range_is_the_packages() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["vllm"]
    (required,) = (r.specifier for r in map(Requirement, extras) if r.name == "vllm")
    assert [required.contains(f"0.{minor}.0") for minor in (15, 16, 33, 34)] == [
        False,
        True,
        True,
        False,
    ]


def test_nothing_starts_with_another_release() -> None:
    assert last_lines(START_EACH)[-4:] == ["refused"] * 4
