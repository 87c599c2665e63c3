"""vLLM's own model of a saved checkpoint, in worker processes without an engine around it.

With `plain`, vLLM computes with the weights as they are loaded, as it does on a GPU, and as it does
on a processor for which it has no packed form of them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rollsync.shell.refit.load_recorder import LoadRecorder
from rollsync.shell.refit.refit_receiver import RefitReceiver

if TYPE_CHECKING:
    from rollsync.shell.refit.vllm_loader import VllmModelUpdate

_T = TypeVar("_T")
START_TIMEOUT_S = 240


@dataclass(frozen=True)
class VllmModel:
    """A model as a worker has it."""

    config: Any
    module: torch.nn.Module
    rank: int

    def update(self, recorder: LoadRecorder | None) -> VllmModelUpdate:
        """An update of it by vLLM's own loader."""
        from rollsync.shell.refit.vllm_loader import VllmModelUpdate

        return VllmModelUpdate(self.config, self.config.model_config, self.module, recorder)

    def receiver(self) -> RefitReceiver:
        """The receiving end of an engine that is this model alone."""
        return RefitReceiver(
            local_rank=0,
            engine_world_size=1,
            make_update=self.update,
            model=lambda: self.module,
        )


def on_ranks(
    work: Callable[[VllmModel], _T],
    path: str,
    *,
    ranks: int,
    plain: bool,
    stages: int = 1,
    whole_experts: bool = False,
) -> list[_T]:
    """What `work` answers on each rank of an engine; it has to be a module's function.

    Args:
        ranks: of the engine: tensor-parallel ranks of every pipeline stage.
        stages: pipeline stages.
        whole_experts: deals experts to the tensor-parallel ranks, in the place of slices of them.
    """
    run = partial(_run, work, path, ranks, stages, plain, whole_experts)
    context = multiprocessing.get_context("spawn")
    rendezvous = f"file://{path}.rendezvous-{os.urandom(4).hex()}"
    with context.Pool(ranks) as pool:
        asked = [pool.apply_async(run, (rendezvous, rank)) for rank in range(ranks)]
        return [each.get(START_TIMEOUT_S) for each in asked]


def _run(
    work: Callable[[VllmModel], _T],
    path: str,
    ranks: int,
    stages: int,
    plain: bool,
    whole_experts: bool,
    meet: str,
    rank: int,
) -> _T:
    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = meet.rpartition("-")[2]
    import vllm._custom_ops as custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    if plain:
        vars(custom_ops)["_supports_onednn"] = False
        utils.check_cpu_sgl_kernel = lambda *_: False
    config = EngineArgs(
        model=path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks // stages,
        pipeline_parallel_size=stages,
        enable_expert_parallel=whole_experts,
        distributed_executor_backend="mp" if ranks > 1 else None,
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, meet, rank, "gloo")
        initialize_model_parallel(ranks // stages, stages)
        return work(VllmModel(config, get_model(vllm_config=config), rank))
