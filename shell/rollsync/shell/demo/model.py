"""Makes a small Qwen2 model with its tokenizer, warmed up until it answers some prompts right.

Everything is made on the spot from the task's own text with a fixed seed, in Hugging Face's
format, so that the trainer and vLLM read it like any published model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from msgspec import Struct
from tokenizers import pre_tokenizers
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

END = "<|endoftext|>"
"""Ends an answer, and pads."""
MERGES = 80
"""Merged tokens that the tokenizer learns: enough for the words of a task's question."""
LOSS_WINDOW = 20
"""Steps over which the loss is averaged."""
IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out."""


class Example(Struct, frozen=True, kw_only=True):
    """One question with its right answer."""

    question: str
    answer: str


class WarmUp(Struct, frozen=True, kw_only=True):
    """How much supervised training the model gets before reinforcement learning starts."""

    until_loss: float
    """Stop when the mean loss of `LOSS_WINDOW` steps is below this, nats per answer token."""
    max_steps: int
    """Stop here at the latest."""
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 0


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Train a byte-level byte-pair tokenizer on `texts`, of the kind that Qwen2 models have.

    Its pre-tokenizer keeps digits single, so that an answer is spelt digit by digit.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: index for index, token in enumerate([END, *sorted(alphabet)])}
    untrained = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=END, eos_token=END, pad_token=END
    )
    trained: PreTrainedTokenizerBase = untrained.train_new_from_iterator(
        texts, vocab_size=len(vocabulary) + MERGES, show_progress=False
    )
    return trained


def make_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 architecture of about 0.2 million parameters with tied embeddings."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            # 32 wide heads are the narrowest that vLLM's attention for CPUs has.
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            dtype=torch.float32,
        )
    )


def supervised_batch(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both `(batch, length)`; labels count the answer and its end only."""
    rows: list[list[int]] = []
    labels: list[list[int]] = []
    for example in examples:
        prompt = tokenizer.encode(example.question, add_special_tokens=False)
        answer = tokenizer.encode(example.answer, add_special_tokens=False)
        answer.append(tokenizer.eos_token_id)
        rows.append(prompt + answer)
        labels.append([IGNORED_LABEL] * len(prompt) + answer)
    longest = max(map(len, rows))
    ids = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    targets = [row + [IGNORED_LABEL] * (longest - len(row)) for row in labels]
    return torch.tensor(ids), torch.tensor(targets)


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    how: WarmUp,
) -> int:
    """Train `model` on `examples`; the steps that it took."""
    generator = torch.Generator().manual_seed(how.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, weight_decay=0.0)
    losses: deque[float] = deque(maxlen=LOSS_WINDOW)
    steps = 0
    model.train()
    while steps < how.max_steps:
        chosen = torch.randint(len(examples), (how.batch_size,), generator=generator)
        ids, labels = supervised_batch(tokenizer, [examples[int(i)] for i in chosen])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        losses.append(float(loss.detach()))
        if len(losses) == LOSS_WINDOW and fmean(losses) < how.until_loss:
            break
    model.eval()
    return steps


def make_checkpoint(directory: Path, examples: Sequence[Example], how: WarmUp) -> None:
    """Write a warmed-up model and its tokenizer to `directory` in Hugging Face's format."""
    # So small a model trains fastest on one thread, and equally fast beside other work.
    torch.set_num_threads(1)
    tokenizer = make_tokenizer([f"{e.question} {e.answer}" for e in examples])
    model = make_model(tokenizer, seed=how.seed)
    warm_up(model, tokenizer, examples, how)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
