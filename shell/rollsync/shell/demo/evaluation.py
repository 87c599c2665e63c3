"""How good a saved policy is: its mean reward on prompts that the run never sees."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from rollsync.pure.config import MasterConfig
from rollsync.shell.refit.generation import SamplingSettings
from rollsync.shell.refit.torch_generation import sample
from rollsync.shell.rollout.prompts import ReasoningGymDataset
from rollsync.shell.run.tokenizer import PolicyTokenizer

PROMPTS = 100
COMPLETIONS = 4
SEED = 5
"""Of the prompts, and of the sampling: equal policies have equal rewards."""


def mean_reward(policy: Path, config: MasterConfig) -> float:
    """Mean reward, from 0 to 1, of `COMPLETIONS` answers to each of `PROMPTS` held-out prompts.

    Args:
        policy: a model in Hugging Face's format.
        config: the run's, for the task and how to sample.
    """
    dataset = ReasoningGymDataset(replace(config.data, size=PROMPTS, seed=config.data.seed + SEED))
    tokenizer = PolicyTokenizer(str(policy))
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    sampling = SamplingSettings(
        n=COMPLETIONS,
        max_new_tokens=config.generation.max_new_tokens,
        temperature=config.generation.temperature,
        stop_token_ids=(tokenizer.end_token_id,),
    )
    rewards: list[float] = []
    for index in range(PROMPTS):
        datum = dataset.sample(index)
        prompt = tokenizer.encode(datum.content)
        for completion in sample(model, prompt, sampling, SEED + index * COMPLETIONS, 0):
            answer = tokenizer.decode(completion.token_ids).strip()
            rewards.append(dataset.score(datum.sample_id, answer))
    return fmean(rewards)
