"""What a driver may do with the actors' classes of vLLM engines, and what it may ask them for."""

import ast
from pathlib import Path

import pytest

from rollsync.shell.refit import vllm_generation
from rollsync.shell.refit.errors import RefitConfigurationError
from rollsync.shell.refit.vllm_generation import (
    OWN_OPTIONS,
    VllmGenerationWorker,
    VllmSyncGenerationWorker,
)


@pytest.mark.parametrize("option", OWN_OPTIONS)
@pytest.mark.parametrize("worker", [VllmGenerationWorker, VllmSyncGenerationWorker])
def test_an_option_that_a_refit_depends_on_is_refused_by_name(
    worker: type[VllmGenerationWorker | VllmSyncGenerationWorker], option: str
) -> None:
    with pytest.raises(RefitConfigurationError, match=f"{option!r} is rollsync's own to set"):
        worker("a-model", {"max_model_len": 64, option: "another"})


def test_vllm_is_imported_in_functions_and_for_types_only() -> None:
    """The imports of a driver, which needs no vLLM, are what stands at the module's top."""
    tree = ast.parse(Path(vllm_generation.__file__).read_text())
    top = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    shown = [ast.unparse(each) for each in top]
    assert shown
    assert not [each for each in shown if "vllm" in each]
