"""The policy's tokenizer, as a rollout uses it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rollsync.shell.config import ConfigError

_ANY_TEXT = "What is 1 + 1?"
"""Whatever a tokenizer was made for, some of this is in its vocabulary."""


class PolicyTokenizer:
    """The policy's tokenizer, as the rollout pump uses it.

    Args:
        path: directory of the model.

    Raises:
        ConfigError: there is no tokenizer, or none that a run can use.
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
        # Without its files, some models' tokenizers are made all the same, with no vocabulary.
        if set(self.encode(_ANY_TEXT)) <= set(self._tokenizer.all_special_ids):
            raise ConfigError(
                f"model.path: there is no tokenizer in {path}, or one without a vocabulary: it"
                f" makes no tokens of {_ANY_TEXT!r}",
                remedy="put the tokenizer's files there (tokenizer.json or the like), as its"
                " `save_pretrained` does",
                paths=("model.path",),
            )
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
