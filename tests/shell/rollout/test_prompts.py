"""Prompts are real reasoning-gym samples, found again by id, scored by their own verifier."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollsync.pure.config import DataConfig
from rollsync.pure.rollout.state import DataloaderState
from rollsync.shell.config import ConfigError
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset

CONFIG = DataConfig(
    task="chain_sum", size=10, seed=3, options={"min_terms": 2, "max_terms": 2, "max_digits": 1}
)


def test_pulling_in_portions_hands_out_each_sample_once() -> None:
    loader = PromptDataloader(ReasoningGymDataset(CONFIG), max_epochs=1)
    state = DataloaderState(epoch=0, position=0, dataset_digest=loader.digest, seed=1)
    seen: list[str] = []
    while loader.prompts_left(state):
        pulled = loader.pull(state, 4)
        seen.extend(reference.sample_id for reference in pulled.references)
        state = pulled.after
    assert sorted(seen) == sorted(f"chain_sum:{index}" for index in range(10))


def test_a_reference_leads_back_to_its_sample() -> None:
    loader = PromptDataloader(ReasoningGymDataset(CONFIG), max_epochs=1)
    state = DataloaderState(epoch=0, position=0, dataset_digest=loader.digest, seed=1)
    (reference,) = loader.pull(state, 1).references
    datum = PromptDataloader(ReasoningGymDataset(CONFIG), max_epochs=1).lookup(reference.sample_id)
    assert datum is not None
    assert loader.content_digest(datum) == reference.content_digest
    for unknown in ("chain_sum:10", "chain_sum:x", "other:1", ""):
        assert loader.lookup(unknown) is None


def test_the_verifier_tells_right_from_wrong() -> None:
    dataset = ReasoningGymDataset(CONFIG)
    answer = dict(dataset.sample(4).extra)["answer"]
    assert dataset.score("chain_sum:4", answer) == 1.0
    assert dataset.score("chain_sum:4", answer + "1") < 1.0


def test_another_dataset_has_another_digest() -> None:
    digests = {
        ReasoningGymDataset(config).digest
        for config in (CONFIG, replace(CONFIG, seed=4), replace(CONFIG, size=11))
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        replace(CONFIG, task="no_such_task"),
        replace(CONFIG, options={"no_such_option": 1}),
        replace(CONFIG, options={"min_terms": -5}),
    ],
)
def test_a_task_or_option_that_is_not_there_is_named(wrong: DataConfig) -> None:
    with pytest.raises(ConfigError, match="reasoning-gym makes no dataset"):
        ReasoningGymDataset(wrong)
