"""When the next save is due, and warnings about cadences that cannot fire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollsync.pure.config import (
    CheckpointingConfig,
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    MasterConfig,
    ModelConfig,
    RunConfig,
)
from rollsync.pure.rollout.cadence import cadence_warnings, next_save
from rollsync.pure.rollout.sampler import WindowedSampler

SECONDS = st.floats(0.01, 1000)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.booleans())
def test_the_last_save_has_twice_the_longest_save_before_the_deadline_and_a_step_if_it_needs_one(
    interval_s: float,
    deadline_s: float,
    now_s: float,
    tried_s: float,
    longest_save_s: float,
    longest_step_s: float,
    margin_s: float,
    rare: bool,
) -> None:
    saving = CheckpointingConfig(
        snapshot_interval_s=interval_s,
        checkpoint_must_save_by_s=deadline_s,
        trainer_every_steps=2 if rare else 1,
    )
    upcoming = next_save(
        saving,
        now_s=now_s,
        tried_s=tried_s,
        longest_save_s=longest_save_s,
        longest_step_s=longest_step_s,
        margin_s=margin_s,
    )
    needed_s = max(margin_s, 2 * longest_save_s)
    last_s = deadline_s - (needed_s + longest_step_s if rare else needed_s)
    assert upcoming.at_s >= now_s
    if upcoming.is_last:
        assert upcoming.at_s == max(now_s, last_s)
    else:
        assert upcoming.at_s + longest_save_s < last_s


@given(SECONDS, SECONDS, SECONDS)
def test_without_a_deadline_every_save_is_periodic(
    interval_s: float, now_s: float, tried_s: float
) -> None:
    """An interval after the one before, or at once if that is past."""
    saving = CheckpointingConfig(snapshot_interval_s=interval_s)
    upcoming = next_save(
        saving, now_s=now_s, tried_s=tried_s, longest_save_s=1, longest_step_s=1, margin_s=30
    )
    assert (upcoming.at_s, upcoming.is_last) == (max(now_s, tried_s + interval_s), False)


def warnings(saving: CheckpointingConfig) -> tuple[str, ...]:
    return cadence_warnings(
        MasterConfig(
            run=RunConfig(directory="run"),
            data=DataConfig(task="sum", size=100),
            model=ModelConfig(path="model"),
            grpo=GrpoConfig(
                num_prompts_per_step=2,
                num_generations_per_prompt=2,
                max_steps=10,
                learning_rate=1e-3,
            ),
            generation=GenerationConfig(backend="torch", max_new_tokens=4),
            sampler=WindowedSampler(),
            checkpointing=saving,
        )
    )


def test_cadences_that_never_fire_are_named() -> None:
    good = CheckpointingConfig(snapshot_interval_s=10, trainer_every_steps=1)
    assert warnings(good) == ()
    (late,) = warnings(replace(good, checkpoint_must_save_by_s=10))
    assert "snapshot_interval_s (10) is not shorter" in late
    (never,) = warnings(replace(good, trainer_every_steps=11))
    assert "more than grpo.max_steps (10)" in never
    (between,) = warnings(replace(good, trainer_every_steps=5))
    assert "none is saved in the steps between" in between
