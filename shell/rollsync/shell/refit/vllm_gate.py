"""Keeps a vLLM model from answering requests with weights that are not those of one whole update.

vLLM's own weight-update calls have no place for a refusal, so the model itself refuses: its forward
pass, and its logits, which are computed apart from it also where a CUDA graph replays the forward
pass without calling it. vLLM ends an engine whose model raises: that is loud, and its log names the
error, where a mixture of weights would have answered as if nothing had happened.

Rule kept here: a pass that is for no request, such as the empty ones that keep data-parallel ranks
in step, is never refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from rollsync.shell.refit.errors import EngineNotServing


class ModelGate:
    """Lets one model answer, or not; open at first.

    Args:
        model: as the worker has it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._cause = ""
        model.register_forward_pre_hook(self._check_pass)
        compute_logits: object = getattr(model, "compute_logits", None)
        if callable(compute_logits):
            vars(model)["compute_logits"] = self._guarded(compute_logits)

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

    def _check_pass(self, _: torch.nn.Module, __: object) -> None:
        if is_forward_context_available() and get_forward_context().attn_metadata:
            self.check()

    def _guarded(self, compute_logits: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(compute_logits)
        def guarded(*args: Any, **kwargs: Any) -> object:
            self.check()
            return compute_logits(*args, **kwargs)

        return guarded
