"""The policy's tokenizer, as a rollout uses it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollsync.shell.config import ConfigError


class PolicyTokenizer:
    """The policy's tokenizer, as the rollout pump uses it.

    Args:
        path: directory of the model.
    """

    def __init__(self, path: str) -> None:
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path: there is no tokenizer in {path}: {str(error).splitlines()[0]}",
                remedy="give a directory in Hugging Face's format, with its tokenizer",
                paths=("model.path",),
            ) from error
        end = self._tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError(
                f"model.path: the tokenizer in {path} has no end-of-sequence token",
                remedy="use a model whose tokenizer has one",
                paths=("model.path",),
            )
        self.end_token_id = end

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        (text,) = self._tokenizer.batch_decode([list(token_ids)], skip_special_tokens=True)
        return text
