"""`rollsync.pure.rollout` in someone else's program."""

from typing import assert_never, assert_type

from returns.result import Result

from rollsync.pure.rollout import (
    Capture,
    CaptureRefused,
    CheckpointKind,
    Dropped,
    InOrderSampler,
    NothingLeft,
    PromptGroupSampler,
    PromptOutcome,
    ResumePlan,
    ResumePolicy,
    RolloutCheckpointAttemptReason,
    RolloutCheckpointOutcome,
    RolloutState,
    RolloutStateDiff,
    SamplerLimits,
    SkipStep,
    TrainBatch,
    Trained,
    TransitionError,
    Violation,
    Wait,
    WindowedSampler,
    apply,
    capture,
    check_invariants,
    diff,
    explain,
    fresh_state,
    patch,
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


def batch(sampler: PromptGroupSampler, limits: SamplerLimits) -> RolloutState:
    # A decision carries the event to apply; every answer has to be thought of.
    match sampler.select(state, limits):
        case TrainBatch(event=claim) | SkipStep(event=claim):
            return apply(state, claim).unwrap()
        case NothingLeft() | Wait():
            return state


# All built-in policies fit the protocol, and so does a user's own.
samplers: list[PromptGroupSampler] = [WindowedSampler(), InOrderSampler(max_lookahead_versions=2)]

change = diff(state, state)
assert_type(change, RolloutStateDiff)
assert_type(patch(state, change), RolloutState)
assert_type(capture(state, CheckpointKind.ROLLOUT_SNAPSHOT), Result[Capture, CaptureRefused])
assert_type(check_invariants(state), tuple[Violation, ...])
assert_type(RolloutCheckpointAttemptReason.TIMEOUT.outcome, RolloutCheckpointOutcome)

# A policy is a frozen value.
WindowedSampler().max_staleness_versions = 3  # type: ignore[misc]

# What is saved is asked for by kind, not by a string.
capture(state, "rollout_snapshot")  # type: ignore[arg-type]

# Only an event changes a state.
apply(state, change)  # type: ignore[arg-type]

# A class that only looks like a policy is none.
samplers.append(object())  # type: ignore[arg-type]
