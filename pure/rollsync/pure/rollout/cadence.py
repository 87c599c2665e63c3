"""When the next snapshot is due, and which settings can never do what they say.

Clock readings are arguments. All times are seconds since the run began.
"""

from __future__ import annotations

from msgspec import Struct

from rollsync.pure.config import CheckpointingConfig, MasterConfig


class NextSave(Struct, frozen=True, kw_only=True):
    """What the pump does next."""

    at_s: float
    is_last: bool
    """The forced one before the deadline."""


def next_save(
    config: CheckpointingConfig,
    *,
    now_s: float,
    tried_s: float,
    longest_save_s: float,
    longest_step_s: float,
    margin_s: float,
) -> NextSave:
    """When to save next.

    Args:
        tried_s: when the save before was tried, or when the run began.
        longest_save_s: how long the longest save so far took. The last one is given twice that.
        longest_step_s: how long the longest training step so far took. The last save is given that
            too, where a step may have no checkpoint: then the one under way has to end first.
        margin_s: the last one starts at least this long before the deadline.
    """
    periodic_s = max(now_s, tried_s + config.snapshot_interval_s)
    deadline_s = config.checkpoint_must_save_by_s
    if deadline_s is None:
        return NextSave(at_s=periodic_s, is_last=False)
    needed_s = max(margin_s, 2 * longest_save_s)
    if config.trainer_every_steps > 1:
        needed_s += longest_step_s
    last_s = max(now_s, deadline_s - needed_s)
    if periodic_s + longest_save_s < last_s:
        return NextSave(at_s=periodic_s, is_last=False)
    return NextSave(at_s=last_s, is_last=True)


def cadence_warnings(config: MasterConfig) -> tuple[str, ...]:
    """Settings under which less is saved than a reader of them would think."""
    found = []
    saving = config.checkpointing
    interval_s, deadline_s = saving.snapshot_interval_s, saving.checkpoint_must_save_by_s
    if deadline_s is not None and interval_s >= deadline_s:
        found.append(
            f"checkpointing.snapshot_interval_s ({interval_s:g}) is not shorter than "
            f"checkpoint_must_save_by_s ({deadline_s:g}): no periodic snapshot is ever made, only "
            "the last one; shorten the interval"
        )
    every, steps = saving.trainer_every_steps, config.grpo.max_steps
    if every > steps:
        found.append(
            f"checkpointing.trainer_every_steps ({every}) is more than grpo.max_steps ({steps}): "
            "no trainer checkpoint is made before the end, and a rollout snapshot needs that of "
            "its own step, so that none can be saved after step 0; save the trainer more often"
        )
    elif every > 1:
        found.append(
            f"checkpointing.trainer_every_steps is {every}, and a rollout snapshot needs the "
            "trainer checkpoint of its own step: none is saved in the steps between; save the "
            "trainer every step if those matter"
        )
    return tuple(found)
