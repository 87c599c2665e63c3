"""What a model loaded from saved weights answers, in this process."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.torch_generation import sample

SEED = 11


def reference_answer(
    folder: str, prompt: Sequence[int], sampling: SamplingSettings, version: int
) -> list[Completion]:
    """Samples with `SEED`, in one thread as the engines do: the order of sums depends on it."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return sample(model, prompt, sampling, SEED, version)
    finally:
        torch.set_num_threads(threads)
