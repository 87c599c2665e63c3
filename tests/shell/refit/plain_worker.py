"""vLLM's worker on a processor, which computes with weights as they are loaded, as on a GPU.

By itself vLLM packs them all: here only those that an MLP ends with, so that there are some of both
kinds.
"""

from __future__ import annotations

import torch
import vllm._custom_ops as custom_ops
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.shell.refit.vllm_engines import PACKED

_prepare = utils.dispatch_cpu_unquantized_gemm


def _prepare_or_leave(layer: torch.nn.Module, remove_weight: bool) -> None:
    vars(custom_ops)["_supports_onednn"] = getattr(layer, "prefix", "").endswith(PACKED)
    _prepare(layer, remove_weight)


class PlainWorker(CPUWorker):
    """Such a worker: to import it is enough."""


utils.dispatch_cpu_unquantized_gemm = _prepare_or_leave
