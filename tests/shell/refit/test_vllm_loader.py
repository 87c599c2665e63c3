"""An update that vLLM's layerwise reload does not see is refused, and never half done."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from rollsync.shell.refit.errors import UnsupportedVllm, WeightMismatch

if TYPE_CHECKING:
    from rollsync.shell.refit.vllm_loader import VllmModelUpdate

# What vLLM imports warns about torch's own future; that is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Model(torch.nn.Module):
    """Two layers, the second of which may be loaded by writing to its parameter."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.plain = torch.nn.Linear(3, 2, bias=False)
        self.experts = torch.nn.Linear(3, 2, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameter = parameters[name]
            if self.writes and name == "experts.weight":
                parameter.data.copy_(tensor)
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return loaded


def update_of(model: Model) -> VllmModelUpdate:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from rollsync.shell.refit.vllm_loader import VllmModelUpdate

    record_metadata_for_reloading(model)
    config = SimpleNamespace(quantization=None, dtype=torch.float32)
    return VllmModelUpdate(VllmConfig(), config, model)  # type: ignore[arg-type]


def test_a_loader_that_passes_the_reload_by_is_refused_and_its_model_as_it_was() -> None:
    model = Model(writes=True)
    old = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    update = update_of(model)
    update.start()
    update.load([(name, torch.ones(2, 3)) for name in old])
    with pytest.raises(UnsupportedVllm, match=r"'experts\.weight' past"):
        update.finish()
    update.abort()
    assert torch.equal(model.experts.weight, old["experts.weight"])


def test_a_scale_of_a_cache_without_scales_is_refused_with_what_to_do() -> None:
    model = Model(writes=False)
    # As vLLM's attention has it, with scales or without.
    model.plain.register_buffer("_k_scale", torch.tensor(1.0))
    old = model.plain.weight.detach().clone()
    update = update_of(model)
    update.start()
    with pytest.raises(WeightMismatch, match=r"'plain\.k_scale' .*kv_cache_scheme.* no kv_scales"):
        update.load([("plain.weight", torch.ones(2, 3)), ("plain.k_scale", torch.tensor(0.5))])
    update.abort()
    assert torch.equal(model.plain.weight, old)


def test_what_the_reload_loads_is_loaded() -> None:
    model = Model(writes=False)
    update = update_of(model)
    update.start()
    update.load([("plain.weight", torch.ones(2, 3))])
    update.load([("experts.weight", torch.ones(2, 3))])
    update.finish()
    assert all(bool((tensor == 1).all()) for tensor in model.parameters())
    update.start()
    update.load([("plain.weight", torch.zeros(2, 3))])
    with pytest.raises(WeightMismatch, match=r"experts\.weight"):
        update.finish()
    update.abort()
