"""What a run's configuration means for its sampler and for its resume.

The controller and the commands that explain a run both take it from here, so that what a command
says is what a resume does.
"""

from __future__ import annotations

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.decisions import SamplerLimits
from rollsync.pure.rollout.resume import ResumePolicy
from rollsync.pure.rollout.sampler import PromptGroupSampler


def buffer_capacity(config: MasterConfig, sampler: PromptGroupSampler) -> int:
    """Most groups that may be admitted and untrained: the configured number, else as many as the
    sampler needs."""
    needed = sampler.required_buffer_capacity(config.grpo.num_prompts_per_step)
    return config.buffer_capacity or needed


def sampler_limits(
    config: MasterConfig,
    *,
    capacity: int | None,
    prompts_left: bool,
    served_weight_version: int,
) -> SamplerLimits:
    """What the sampler must know beside the state; see `SamplerLimits`.

    Args:
        capacity: of the run's buffer, in groups; None for no limit.
    """
    return SamplerLimits(
        num_prompts_per_step=config.grpo.num_prompts_per_step,
        num_generations_per_prompt=config.grpo.num_generations_per_prompt,
        granularity=config.recovery.granularity,
        buffer_capacity=capacity,
        prompts_left=prompts_left,
        served_weight_version=served_weight_version,
    )


def resume_policy(
    config: MasterConfig, sampler: PromptGroupSampler, limits: SamplerLimits
) -> ResumePolicy:
    """The settings that a resume depends on."""
    return ResumePolicy(
        sampler=sampler,
        limits=limits,
        load_buffer=config.recovery.load_replay_buffer,
        max_recoveries=config.recovery.max_recoveries,
        max_failed_attempts=config.recovery.max_attempts,
    )
