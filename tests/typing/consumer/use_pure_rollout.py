"""`rollsync.pure.rollout` in someone else's program."""

from typing import assert_never, assert_type

from returns.result import Result

from rollsync.pure.rollout import (
    Dropped,
    PromptOutcome,
    ResumePlan,
    ResumePolicy,
    RolloutState,
    Trained,
    TransitionError,
    apply,
    explain,
    fresh_state,
    plan_resume,
    why,
)
from rollsync.pure.rollout.events import AttemptDispatched, RolloutEvent

state = fresh_state(dataset_digest="00", seed=1, sampler_stamps_target_steps=False)
assert_type(state, RolloutState)

event = AttemptDispatched(group_id="g", sibling_index=0, attempt_index=0)
result = apply(state, event)
assert_type(result, Result[RolloutState, TransitionError])
assert_type(why(result.failure()), str)


def resume(policy: ResumePolicy) -> tuple[str, ...]:
    plan = plan_resume(state, policy)
    assert_type(plan, ResumePlan)
    assert_type(plan.events, tuple[RolloutEvent, ...])
    return explain(plan)


def step_of(outcome: PromptOutcome) -> int:
    # Every outcome is one of these: mypy notices when one is forgotten.
    match outcome:
        case Trained() | Dropped():
            return outcome.step
        case _:
            assert_never(outcome)


# State changes by events only.
state.next_commit_index = 3  # type: ignore[misc]
state.ledger.groups["g"] = None  # type: ignore[index]

# What happened is an event and not a word.
apply(state, "dispatched")  # type: ignore[arg-type]

# A result is not the state: a refused event has to be looked at.
apply(apply(state, event), event)  # type: ignore[arg-type]

# An event carries everything that the decision needs, by name.
AttemptDispatched(group_id="g", sibling_index=0)  # type: ignore[call-arg]
AttemptDispatched("g", 0, 0)  # type: ignore[call-arg]
