"""The arithmetic of GRPO, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rollsync.shell.grpo import clipped_policy_loss, group_relative_advantages


def test_advantages_are_relative_to_the_group() -> None:
    advantages = group_relative_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1, 1, 1]]))
    assert advantages[0].tolist() == pytest.approx([1, -1, -1, 1], abs=1e-4)
    assert advantages[1].tolist() == [0, 0, 0, 0]


def test_the_loss_is_the_clipped_surrogate_of_the_tokens_that_count() -> None:
    new = torch.log(torch.tensor([[0.6, 0.5], [0.9, 0.1]]))
    old = torch.log(torch.tensor([[0.3, 0.5], [0.3, 0.1]]))
    counts = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss = clipped_policy_loss(
        new, old, torch.tensor([1.0, -1.0]), counts, counted_in_step=3, clip_ratio=0.2
    )
    # Row 0: min(2, 1.2) + 1. Row 1: min(-3, -1.2), its second token does not count.
    assert float(loss) == pytest.approx(-(1.2 + 1.0 - 3.0) / 3)


def test_no_token_that_counts_is_no_loss_and_no_nan() -> None:
    nothing = torch.zeros(2, 3)
    garbage = torch.full((2, 3), -1e30)
    loss = clipped_policy_loss(
        garbage, nothing, torch.ones(2), nothing, counted_in_step=0, clip_ratio=0.2
    )
    assert float(loss) == 0.0
    assert not math.isnan(float(loss))
