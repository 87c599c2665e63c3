"""The arithmetic of GRPO (DeepSeekMath, arXiv 2402.03300): advantages and the clipped loss."""

from __future__ import annotations

import torch
from torch import Tensor

ADVANTAGE_EPSILON = 1e-6
"""Keeps the division finite; a group whose rewards are all equal has advantage 0 anyway."""


def group_relative_advantages(rewards: Tensor) -> Tensor:
    """Rewards minus their group's mean, over their group's standard deviation.

    Args:
        rewards: `(groups, siblings)`.

    Returns:
        `(groups, siblings)`; 0 throughout a group whose rewards are all equal.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    deviation = rewards.std(dim=1, keepdim=True, unbiased=False)
    return centred / (deviation + ADVANTAGE_EPSILON)


def clipped_policy_loss(
    log_probabilities: Tensor,
    behaviour_log_probabilities: Tensor,
    advantages: Tensor,
    counts: Tensor,
    *,
    counted_in_step: float,
    clip_ratio: float,
) -> Tensor:
    """The clipped surrogate, averaged over the tokens that count.

    Of rows that are a share of a step, it is their share of the step's loss: the sum over all
    shares is the loss of all rows together.

    Args:
        log_probabilities: of the tokens under the weights being trained, `(rows, tokens)`, nats.
        behaviour_log_probabilities: the same under the weights that generated them.
        advantages: `(rows,)`.
        counts: `(rows, tokens)`, 1.0 for a completion token in the loss, 0.0 for all others.
        counted_in_step: how many tokens count in the whole step, these rows' among them.
        clip_ratio: how far from 1 the ratio may go before its gradient stops.

    Returns:
        A scalar; 0 if no token counts.
    """
    # Padding has no log-probability: keep its garbage out of exp().
    difference = (log_probabilities - behaviour_log_probabilities) * counts
    ratio = difference.exp()
    advantage = advantages.unsqueeze(1)
    clipped = ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage) * counts
    return -surrogate.sum() / max(counted_in_step, 1.0)
