"""Tiny Qwen2 models with random weights, and a policy worker that moves one of them."""

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollsync.pure.refit import TensorSpec
from rollsync.shell.refit.policy_worker import PolicyRefitMixin
from rollsync.shell.refit.weights import checkpoint_weights, declare_weights

VOCABULARY = 96


def make_model(
    *, tied: bool = False, seed: int = 0, vocabulary: int = VOCABULARY
) -> Qwen2ForCausalLM:
    """A model of two layers, in float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def save_model(folder: Path, *, tied: bool = False, vocabulary: int = VOCABULARY) -> str:
    """Saves such a model in Hugging Face's layout; answers its path."""
    make_model(tied=tied, vocabulary=vocabulary).save_pretrained(folder)
    return str(folder)


class TinyPolicy(PolicyRefitMixin):
    """A policy worker whose steps are random, and as large as training's are after a while."""

    def __init__(self, *, tied: bool = False, rank: int = 0, vocabulary: int = VOCABULARY) -> None:
        self.model = make_model(tied=tied, vocabulary=vocabulary)
        self.version = 0
        self.fail_after: int | None = None
        self.intruder: tuple[int, str] | None = None
        self.dies_before_sending = False
        self.refuses_to_send = False
        self.version_is_lost = False
        self.refit_rank = rank

    def weight_version(self) -> int:
        if self.version_is_lost:
            raise ArithmeticError("the version is lost")
        return self.version

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: Mapping[str, object] | None = None
    ) -> object:
        if self.dies_before_sending and checkpoint_method.startswith("send_weights"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.refuses_to_send and checkpoint_method.startswith("send_weights"):
            raise ArithmeticError("it does not even begin")
        return super().checkpoint_engine_rpc(checkpoint_method, method_kwargs)

    def iter_refit_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        for sent, item in enumerate(checkpoint_weights(self.model)):
            if sent == self.fail_after:
                raise ArithmeticError(f"the iterator broke at {item[0]}")
            if self.intruder is not None and sent == self.intruder[0]:
                yield self.intruder[1], torch.ones(2)
            yield item

    def prepare_refit_info(self) -> Mapping[str, TensorSpec]:
        return declare_weights(self.model)

    def process_id(self) -> int:
        return os.getpid()

    def step(self, folder: str | None = None) -> int:
        """Moves the weights, saves them when a folder is given, and answers the new version."""
        self.version += 1
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if folder is not None:
            self.model.save_pretrained(folder)
        return self.version

    def remake(self, *, vocabulary: int = VOCABULARY) -> None:
        """Gets another model in the place of this one."""
        self.model = make_model(vocabulary=vocabulary)

    def break_after(self, tensors: int | None) -> None:
        """Makes the next streams end in an error after so many weights; None makes them whole."""
        self.fail_after = tensors

    def lose_version(self, lost: bool) -> None:
        """Makes the next streams fail before their first weight, or not."""
        self.version_is_lost = lost

    def die_before_sending(self) -> None:
        """Ends this process, as the kernel does for memory, when it is asked for a stream."""
        self.dies_before_sending = True

    def refuse_before_meeting(self, refuses: bool) -> None:
        """Makes it fail before it connects to anybody when it is asked for a stream, or not."""
        self.refuses_to_send = refuses

    def intrude(self, position: int | None, name: str = "") -> None:
        """Puts a weight that no model has into the next streams; None leaves it out again."""
        self.intruder = None if position is None else (position, name)
