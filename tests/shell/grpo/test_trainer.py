"""A trainer learns what is rewarded, and its files hold all that its next step depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollsync.pure.config import GrpoConfig
from rollsync.shell.demo.model import Example, WarmUp, make_checkpoint
from rollsync.shell.grpo import GrpoTrainer, TrainingRow
from rollsync.shell.grpo.trainer import TrainerCheckpointError

CONFIG = GrpoConfig(
    num_prompts_per_step=1, num_generations_per_prompt=2, max_steps=1, learning_rate=1e-3
)
EXAMPLES = [Example(question=f"{a} + {b} =", answer=str(a + b)) for a in range(9) for b in range(9)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, EXAMPLES, WarmUp(until_loss=0.0, max_steps=2))
    return str(directory)


def trainer(model_path: str) -> GrpoTrainer:
    return GrpoTrainer(model_path, CONFIG, temperature=1.0, threads=1, deterministic=True)


def row(tokens: list[int], reward: float, *, masked: bool = False) -> TrainingRow:
    return TrainingRow(
        token_ids=torch.tensor(tokens),
        prompt_length=2,
        behaviour_log_probabilities=torch.full((len(tokens) - 2,), -4.0),
        reward=reward,
        masked=masked,
    )


def step(of: GrpoTrainer, batch: list[list[TrainingRow]]) -> None:
    of.compute_gradients(batch)
    of.apply_gradients()


def log_probability(of: GrpoTrainer, tokens: list[int]) -> float:
    with torch.no_grad():
        return float(of._log_probabilities(torch.tensor([tokens]))[0, 1:].sum())


def test_rewarded_tokens_become_likelier(model_path: str) -> None:
    subject = trainer(model_path)
    good, bad = [3, 4, 5, 6], [3, 4, 7]
    before = log_probability(subject, good) - log_probability(subject, bad)
    metrics = subject.compute_gradients([[row(good, 1.0), row(bad, 0.0)]])
    assert log_probability(subject, good) - log_probability(subject, bad) == before
    subject.apply_gradients()
    after = log_probability(subject, good) - log_probability(subject, bad)
    assert after > before
    assert metrics.tokens == 3
    assert metrics.mean_reward == 0.5
    assert subject.trainer_version == 1


def test_a_masked_row_changes_nothing(model_path: str) -> None:
    subject = trainer(model_path)
    before = {name: weight.clone() for name, weight in subject.module.named_parameters()}
    step(subject, [[row([3, 4, 5], 1.0, masked=True), row([3, 4, 7], 0.0, masked=True)]])
    assert all(
        torch.equal(before[name], weight) for name, weight in subject.module.named_parameters()
    )


def test_a_loaded_trainer_goes_on_bit_for_bit(model_path: str, tmp_path: Path) -> None:
    first = trainer(model_path)
    batches = [[[row([3, 4, 5 + k, 6], 1.0), row([3, 4, 7 + k], 0.0)]] for k in range(4)]
    for batch in batches[:2]:
        step(first, batch)
    first.save(tmp_path)
    second = trainer(model_path)
    second.load(tmp_path)
    for batch in batches[2:]:
        step(first, batch)
        step(second, batch)
    assert second.trainer_version == first.trainer_version == 4
    for (name, weight), (_, loaded) in zip(
        first.module.named_parameters(), second.module.named_parameters(), strict=True
    ):
        assert torch.equal(weight, loaded), name


def test_files_of_another_model_are_refused(model_path: str, tmp_path: Path) -> None:
    subject = trainer(model_path)
    with pytest.raises(TrainerCheckpointError, match="no whole trainer checkpoint"):
        subject.load(tmp_path)
