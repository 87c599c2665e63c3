"""One weight update of a vLLM model, from its first batch to its last.

An update is one layerwise reload: started once, fed every batch, finished once, or aborted. Rules
kept here: a batch may be reused by its owner as soon as `load` returns; after `finish` the device
has done everything; after `abort` the next update starts as if this one had never been, although
the weights are a mixture until it succeeds; and what a model's loader says it loaded was loaded by
the reload. Some loaders (gpt-oss's of vLLM 0.32) write to parameters directly, which a reload does
not see: it would put the old weights back.
"""

import rollsync.shell.refit.vllm_version  # noqa: F401

# isort: split
import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rollsync.shell.refit.errors import RefitError, UnsupportedVllm, WeightMismatch
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors

_PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Of the layers that may compute with the very bytes that are loaded."""

_CACHE_SCALES = (".k_scale", ".v_scale")
"""How the names of a key/value cache's scales end, in a checkpoint and in a model."""


class VllmModelUpdate:
    """An update of one model.

    Args:
        vllm_config: the engine's configuration.
        model_config: the configuration of `model`, which may be a draft model's.
        model: what to update, on this worker.
        recorder: watches what the model's loader does.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model_config: ModelConfig,
        model: torch.nn.Module,
        recorder: LoadRecorder | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._model = model
        self._recorder = recorder
        load_weights: object = getattr(model, "load_weights", None)
        if not callable(load_weights):
            raise RefitError(f"{type(model).__name__} cannot load weights")
        self._load_weights = load_weights
        self._loaded_layers: torch.nn.Module = model
        self._left_out: frozenset[str] = frozenset()
        self._active = False
        self._missing: set[str] = set()
        self._loaded: set[str] = set()
        self._lacks_scales = False

    def leave_out(self, layers: frozenset[str]) -> None:
        """These layers get their weights by another way, straight into what serves."""
        self._left_out = layers
        self._loaded_layers = _Layers(
            layer for name, layer in self._model.named_modules() if name not in layers
        )

    def start(self) -> None:
        """Opens the update; the model cannot run until `finish` or `abort`."""
        if self._active:
            raise RefitError("a weight update of this model is active already")
        self._active = True
        # The reload replaces parameters, but no names.
        self._missing = {
            name
            for name, _ in self._model.named_parameters()
            if name.rpartition(".")[0] not in self._left_out
        }
        self._loaded = set()
        with set_current_vllm_config(self._vllm_config):
            initialize_layerwise_reload(self._loaded_layers)
        self._lacks_scales = _lacks_scales(self._model)
        if self._recorder is not None:
            _prepare_recording(self._recorder, self._model)

    def load(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Loads full tensors under their checkpoint names; returns when they are on the device.

        Raises:
            WeightMismatch: one is a scale of the key/value cache, and the engine's has none.
        """
        if not self._active:
            raise RefitError("weights arrived outside a weight update")
        scale = next((name for name, _ in batch if name.endswith(_CACHE_SCALES)), None)
        if scale is not None and self._lacks_scales:
            raise WeightMismatch(
                f"{scale!r} is a scale of the key/value cache, and the engine's has none",
                tensor=scale,
                remedy="start the engine from a model whose quantization_config has a"
                " kv_cache_scheme, or with another quantization that has scales of its fp8 cache;"
                " or pass no kv_scales",
            )
        with set_current_vllm_config(self._vllm_config), self._watched(batch):
            loaded = self._load_weights(iter(batch))
        # A model without a record of what it loaded, like vLLM's own loader, is not checked.
        self._loaded |= self._missing.intersection(loaded or ())
        self._missing = set() if loaded is None else self._missing.difference(loaded)
        self._keep_what_waits(batch)
        _synchronize_device()

    def finish(self) -> None:
        """Closes the update: every layer holds its new weights, processed for its kernels.

        Raises:
            WeightMismatch: when a parameter got no weights; the update stays open for `abort`.
            UnsupportedVllm: when one would keep its old weights, as a loader passed the reload by.
        """
        if not self._active:
            raise RefitError("no weight update of this model is active")
        if self._missing and self._model_config.quantization is None:
            raise WeightMismatch(
                f"the stream ended without weights for {len(self._missing)} parameters of the "
                f"model, of which {min(self._missing)!r} is one",
                tensor=min(self._missing),
                remedy="send every weight that the engine's checkpoint holds",
            )
        self._check_reloaded()
        with set_current_vllm_config(self._vllm_config), self._watched(()):
            finalize_layerwise_reload(self._loaded_layers, self._model_config)
            _process_tied_layers(self._model)
        _synchronize_device()
        self._active = False

    def abort(self) -> None:
        """Closes a failed update: no layer waits for weights any more. Does nothing without one."""
        if not self._active:
            return
        for layer in self._model.modules():
            waiting = get_layerwise_info(layer)
            if waiting.can_load():
                # With nothing loaded, finalizing puts the layer's own tensors back in place.
                waiting.loaded_weights.clear()
                waiting.load_numel = 0
        with set_current_vllm_config(self._vllm_config):
            finalize_layerwise_reload(self._loaded_layers, self._model_config)
        _synchronize_device()
        self._active = False

    def _check_reloaded(self) -> None:
        for name in sorted(self._loaded):
            layer, _, parameter = name.rpartition(".")
            waiting = get_layerwise_info(self._model.get_submodule(layer))
            if waiting.can_load() and all(
                known != parameter for known, _ in waiting.loaded_weights
            ):
                raise UnsupportedVllm(
                    f"{type(self._model).__name__} writes {name!r} past vLLM's layerwise reload, "
                    "which would keep the old weights",
                    remedy="use a model, or a vLLM, whose loader calls each parameter's own",
                )

    def _watched(
        self, batch: Sequence[tuple[str, torch.Tensor]]
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._recorder is None else self._recorder.loading(batch)

    def _keep_what_waits(self, batch: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copies those weights of the batch that a layer still waits with.

        A layer is loaded when its last weight is there, and until then holds on to views of the
        batch's memory, which the next batch overwrites.
        """
        borrowed = {tensor.untyped_storage().data_ptr() for _, tensor in batch}
        for layer in self._model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                for argument, value in call.arguments.items():
                    if (
                        isinstance(value, torch.Tensor)
                        and value.device.type != "meta"
                        and value.untyped_storage().data_ptr() in borrowed
                    ):
                        call.arguments[argument] = value.clone()


class _Layers(torch.nn.Module):
    """Some layers of a model, as a module that has nothing else."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        # A tuple, so that they are no parts of this one.
        self._layers = tuple(layers)

    def modules(self) -> Iterator[torch.nn.Module]:  # type: ignore[override]
        """The layers."""
        yield from self._layers


def _prepare_recording(recorder: LoadRecorder, model: torch.nn.Module) -> None:
    """Tells what of a model whose reload has begun stands for what."""
    # What is on the meta device now is filled first, and copied when its layer is whole.
    for name, (_, tensor) in serving_tensors(model).items():
        recorder.stand_in(name, tensor)
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, _PLAIN_METHODS):
            recorder.refuse(name, f"{type(method).__name__} processes the layer's weights")


def _process_tied_layers(model: torch.nn.Module) -> None:
    """Processes layers again that share a weight.

    The reload processes only the layer under whose name the weight came; on a CPU the other one
    (an output head tied to the embeddings) would go on with its packed copy of the old weight.
    """
    holders: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(layer)
    for layers in holders.values():
        for layer in layers if len(layers) > 1 else ():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)


def _lacks_scales(model: torch.nn.Module) -> bool:
    """Whether a model whose reload has begun has attention, and none of it takes scales."""
    return any(hasattr(layer, "_k_scale") for layer in model.modules()) and not any(
        name.endswith(_CACHE_SCALES) for name, _ in model.named_parameters()
    )


def _synchronize_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
