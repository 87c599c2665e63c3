"""The policy that a configuration names: a built-in one as it is, a user's own by its name."""

from __future__ import annotations

import pytest

from rollsync.pure.rollout.sampler import InOrderSampler, WindowedSampler
from rollsync.shell.config import ConfigError, parse_config
from rollsync.shell.samplers import load_sampler

SETTINGS = """
run: {directory: run}
data: {task: chain_sum, size: 64}
model: {path: model}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2, max_steps: 4, learning_rate: 1.0e-4}
generation: {backend: torch, max_new_tokens: 4}
sampler: {%s}
"""


class OwnSampler(WindowedSampler, frozen=True, kw_only=True):
    """Somebody's own policy."""


def loaded(sampler: str) -> object:
    return load_sampler(parse_config((SETTINGS % sampler).encode(), source="run.yaml"))


def test_a_built_in_policy_is_its_own_configuration() -> None:
    assert loaded("name: in_order, max_lookahead_versions: 3") == InOrderSampler(
        max_lookahead_versions=3
    )


def test_a_user_s_policy_is_made_with_its_options() -> None:
    target = f"name: custom, target: '{__name__}:OwnSampler'"
    assert loaded(target) == OwnSampler()
    for options in ("{max_staleness_versions: 4}", "[[max_staleness_versions, 4]]"):
        assert loaded(f"{target}, options: {options}") == OwnSampler(max_staleness_versions=4)


@pytest.mark.parametrize(
    "rest",
    [
        "target: 'no_such_package:Sampler'",
        "target: 'rollsync.pure.rollout.sampler:NoSuchSampler'",
        "target: 'rollsync.pure.rollout.sampler:InOrderSampler', options: [[no_such_option, 1]]",
    ],
)
def test_what_cannot_be_made_is_refused_with_its_path(rest: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(f"name: custom, {rest}")
    assert refused.value.paths == ("sampler.target",)
    assert refused.value.remedy
