"""Events that are illegal where they come: each is refused for its own reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rollsync.pure.rollout import errors
from rollsync.pure.rollout.errors import TransitionError
from rollsync.pure.rollout.events import (
    AttemptAbandoned,
    AttemptFailed,
    CanonicalDuplicateDiscarded,
    FinalizationFailed,
    FinalizationStarted,
    GroupReturnedToReserve,
    GroupsClaimed,
    OptimizerCommitOpened,
    ReadyGroupReopened,
    RecoveryRedispatched,
    ReserveDrawn,
    RolloutEvent,
)
from rollsync.pure.rollout.state import (
    FinalizedReward,
    RecoveryGranularity,
    RolloutState,
    sample_id_of,
    staged_key,
)
from tests.pure.rollout.events_kit import (
    admit,
    admitted,
    after,
    at,
    commit,
    dispatch,
    drop,
    fresh,
    generate,
    made_ready,
    prompt,
    refusal,
    reserve,
    seal,
    spare,
    train,
)

RESERVED = after(fresh(), reserve(0))
ADMITTED = admitted(0, 1)
RUNNING = after(ADMITTED, dispatch("e0p0", 0))
SEALED = after(ADMITTED, *generate("e0p0"))
FINALIZING = after(SEALED, FinalizationStarted(group_id="e0p0"))
READY = made_ready(ADMITTED, "e0p0")
CLAIMED = after(READY, GroupsClaimed(step=1, group_ids=("e0p0",)))
WITH_SPARE = after(fresh(), spare(0))
COMMIT = commit(FINALIZING, "e0p0")
PASSED = after(made_ready(admitted(0, stamped=True), "e0p0"), *train(READY, "e0p0"), reserve(1))

CASES: dict[str, tuple[RolloutState, RolloutEvent, type[TransitionError]]] = {
    # Attempts.
    "dispatch of nothing": (ADMITTED, dispatch("x", 0), errors.UnknownGroup),
    "dispatch of a reserved group": (RESERVED, dispatch("e0p0", 0), errors.WrongPhase),
    "dispatch of a sealed group": (SEALED, dispatch("e0p0", 0, 1), errors.WrongStatus),
    "seal of nothing": (RUNNING, seal("x", 0), errors.UnknownGroup),
    "seal of no sibling": (RUNNING, seal("e0p0", 7), errors.UnknownSibling),
    "seal of a later attempt": (RUNNING, seal("e0p0", 0, 3), errors.UnknownAttempt),
    "seal without rows": (
        RUNNING,
        replace(seal("e0p0", 0), staged_keys=()),
        errors.WrongCount,
    ),
    "seal with a row twice": (
        RUNNING,
        replace(seal("e0p0", 0), staged_keys=(staged_key("e0p0", 0, 0),) * 2),
        errors.RowKeysRefused,
    ),
    "failure of nothing": (
        RUNNING,
        AttemptFailed(group_id="x", sibling_index=0, attempt_index=0),
        errors.UnknownGroup,
    ),
    "abandoning what does not run": (
        ADMITTED,
        AttemptAbandoned(group_id="e0p0", sibling_index=0, attempt_index=0),
        errors.WrongAttemptStatus,
    ),
    "recovery of nothing": (
        ADMITTED,
        RecoveryRedispatched(group_id="x", restart_whole=False),
        errors.UnknownGroup,
    ),
    "recovery of a group that is being finalized": (
        FINALIZING,
        RecoveryRedispatched(group_id="e0p0", restart_whole=True),
        errors.WrongStatus,
    ),
    # Finalization.
    "finalization of nothing": (ADMITTED, FinalizationStarted(group_id="x"), errors.UnknownGroup),
    "finalization that did not start": (
        SEALED,
        FinalizationFailed(group_id="e0p0", outcome_known=True),
        errors.WrongStatus,
    ),
    "commit with a row too few": (
        FINALIZING,
        replace(COMMIT, sample_ids=COMMIT.sample_ids[:1]),
        errors.WrongCount,
    ),
    "commit with a length too many": (
        FINALIZING,
        replace(COMMIT, lengths=(1, 2, 3)),
        errors.WrongCount,
    ),
    "commit with a reward of no sibling": (
        FINALIZING,
        replace(COMMIT, rewards=(FinalizedReward(sibling_index=2, reward=1.0),)),
        errors.UnknownSibling,
    ),
    "commit of weights from the future": (
        FINALIZING,
        replace(COMMIT, end_weight_version=1),
        errors.WrongWeightVersion,
    ),
    "commit of a row that is being cleared": (
        after(
            FINALIZING,
            FinalizationFailed(group_id="e0p0", outcome_known=True),
            RecoveryRedispatched(group_id="e0p0", restart_whole=True),
            *(dispatch("e0p0", 0, 1), seal("e0p0", 0, 1)),
            *(dispatch("e0p0", 1, 1), seal("e0p0", 1, 1)),
            FinalizationStarted(group_id="e0p0"),
        ),
        replace(COMMIT, sample_ids=(staged_key("e0p0", 0, 0), sample_id_of("e0p0", 1))),
        errors.RowKeysRefused,
    ),
    # Hand-out and admission.
    "a batch of groups without siblings": (
        fresh(),
        reserve(0, siblings=0),
        errors.WrongCount,
    ),
    "a batch of nothing": (
        fresh(),
        replace(reserve(0), prompts=(), dataloader_after=at(0)),
        errors.WrongCount,
    ),
    "spares from a gap": (fresh(), spare(1), errors.HandOutGap),
    "the same prompt twice": (
        fresh(),
        replace(reserve(0), prompts=(prompt(0), prompt(0))),
        errors.RepeatedIds,
    ),
    "a prompt id that could be a row key": (
        fresh(),
        replace(reserve(0), prompts=(replace(prompt(0), prompt_id="a/b"),)),
        errors.IllegalPromptId,
    ),
    "a prompt that was dropped": (
        after(RESERVED, drop("e0p0", None)),
        replace(
            reserve(1), prompts=(replace(prompt(1), prompt_id="e0p0"),), dataloader_after=at(2)
        ),
        errors.PromptHandedOutTwice,
    ),
    "groups without siblings from the reserve": (
        WITH_SPARE,
        ReserveDrawn(count=1, granularity=RecoveryGranularity.SIBLING, expected_generations=0),
        errors.WrongCount,
    ),
    "no prompt from the reserve": (
        WITH_SPARE,
        ReserveDrawn(count=0, granularity=RecoveryGranularity.SIBLING, expected_generations=1),
        errors.WrongCount,
    ),
    "an admitted group into the reserve": (
        ADMITTED,
        GroupReturnedToReserve(group_id="e0p0"),
        errors.WrongPhase,
    ),
    "nothing into the reserve": (
        ADMITTED,
        GroupReturnedToReserve(group_id="x"),
        errors.UnknownGroup,
    ),
    "admission of nothing": (RESERVED, replace(admit(RESERVED), group_ids=()), errors.WrongCount),
    "a negative shortfall": (RESERVED, admit(RESERVED, 0, shortfall=-1), errors.WrongCount),
    "a batch whose step has passed": (
        replace(PASSED, sampler_dispatch_index=-1),
        replace(admit(PASSED, 1), dispatch_index=0, target_step=0),
        errors.WrongTargetStep,
    ),
    "a shortfall of a step that has passed": (
        replace(after(READY, *train(READY, "e0p0"), reserve(2)), sampler_dispatch_index=-1),
        replace(admit(READY, 2, shortfall=1), dispatch_index=0),
        errors.ShortfallRefused,
    ),
    # Training and removal.
    "a group claimed twice": (
        READY,
        GroupsClaimed(step=1, group_ids=("e0p0", "e0p0")),
        errors.RepeatedIds,
    ),
    "the window of another step": (CLAIMED, OptimizerCommitOpened(step=2), errors.StepMismatch),
    "a drop of nothing": (ADMITTED, drop("x", 0), errors.UnknownGroup),
    "a replacement with weights from the future": (
        ADMITTED,
        replace(drop("e0p0", 0), start_weight_version=1),
        errors.WrongWeightVersion,
    ),
    "reopening a claimed group": (
        CLAIMED,
        ReadyGroupReopened(group_id="e0p0"),
        errors.GroupClaimed,
    ),
    "reopening an unfinished group": (
        ADMITTED,
        ReadyGroupReopened(group_id="e0p0"),
        errors.UnknownGroup,
    ),
    "discarding nothing": (
        ADMITTED,
        CanonicalDuplicateDiscarded(group_id="x"),
        errors.UnknownGroup,
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_refused(what: str) -> None:
    state, event, reason = CASES[what]
    assert type(refusal(state, event)) is reason
