"""Keeps a vLLM worker from answering requests with weights that are not those of one whole update.

vLLM's own calls have no place for a refusal, so what computes refuses: the worker's runner where
rollsync is an extension of the worker, and the model where it is given no more than that. vLLM ends
an engine in which that is raised: that is loud, and its log names the error, where a mixture of
weights would have answered as if nothing had happened.

Rule kept here: a pass that is for no request, such as the empty ones that keep data-parallel ranks
in step, is never refused.
"""

import rollsync.shell.refit.vllm_version  # noqa: F401

# isort: split
import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from rollsync.shell.refit.errors import EngineNotServing


class Gate:
    """Lets requests be computed, or not; open at first."""

    def __init__(self) -> None:
        self._cause = ""

    def close(self, cause: str) -> None:
        """Refuses everything from now on, because of `cause`."""
        self._cause = cause

    def open(self) -> None:
        """Refuses nothing any more."""
        self._cause = ""

    def check(self) -> None:
        """Refuses what is about to be computed for a request.

        Raises:
            EngineNotServing: the gate is closed.
        """
        if self._cause:
            raise EngineNotServing(
                f"the engine does not generate: {self._cause}",
                state="poisoned",
                remedy="pause requests during a weight update, and until a whole one succeeds",
            )


class RunnerGate(Gate):
    """The gate of one worker's model runner: nothing is computed at all, by a replayed CUDA graph
    no more than by the model.

    Args:
        runner: as the worker has it.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        execute_model = runner.execute_model

        @functools.wraps(execute_model)
        def guarded(scheduler_output: Any, *args: Any, **kwargs: Any) -> object:
            if scheduler_output.total_num_scheduled_tokens and not kwargs.get("dummy_run"):
                self.check()
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = guarded


class ModelGate(Gate):
    """The gate of one model: its forward pass, and its logits, which are computed apart from it
    also where a CUDA graph replays the forward pass without calling it.

    Args:
        model: as the worker has it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        model.register_forward_pre_hook(self._check_pass)
        for name in ("compute_logits", "compute_logits_local"):
            compute: object = getattr(model, name, None)
            if callable(compute):
                vars(model)[name] = self._guarded(compute)

    def _check_pass(self, _: torch.nn.Module, __: object) -> None:
        if is_forward_context_available() and get_forward_context().attn_metadata:
            self.check()

    def _guarded(self, compute_logits: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(compute_logits)
        def guarded(*args: Any, **kwargs: Any) -> object:
            self.check()
            return compute_logits(*args, **kwargs)

        return guarded
