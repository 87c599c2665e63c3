"""The releases of vLLM that rollsync works with; importing this refuses all others by name.

Rule kept here: nothing of vLLM but its version is looked at, so that a release that lacks what a
module here imports from it is refused for what it is. So such a module imports this one first.
"""

import re

import vllm

from rollsync.shell.refit.errors import UnsupportedVllm

OLDEST_VLLM = (0, 29)
NEWEST_VLLM = (0, 32)
"""The range, both ends included. Before it, a worker's weight transfer has other calls, and a
trainer's source of weights cannot say what it holds; after it, a source is iterated otherwise."""


def check_vllm_version(version: str) -> None:
    """Refuses a vLLM that rollsync was not written for.

    Raises:
        UnsupportedVllm: when `version` is not in the range from `OLDEST_VLLM` to `NEWEST_VLLM`.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OLDEST_VLLM <= release <= NEWEST_VLLM:
        oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST_VLLM, NEWEST_VLLM))
        raise UnsupportedVllm(
            f"vLLM {version} is outside the supported range {oldest} to {newest}",
            remedy=f"install vllm>={oldest},<={newest}.*",
        )


check_vllm_version(vllm.__version__)
