"""Rollout state: what an asynchronous run has in flight, how it changes, and how it resumes.

The public names of the room. See `state` for the values, `transitions` for the one way in which
they change, and `invariants` for the rules that hold between changes.
"""

from rollsync.pure.rollout.account import Account, account, place_of, places
from rollsync.pure.rollout.errors import TransitionError, why
from rollsync.pure.rollout.events import RolloutEvent
from rollsync.pure.rollout.invariants import Rule, Violation, check_invariants
from rollsync.pure.rollout.state import (
    DataloaderState,
    DatumSpec,
    Dropped,
    DropReason,
    FinalizedReward,
    OpenTrainingStep,
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptOutcome,
    PromptPlace,
    PromptReference,
    RecoveryGranularity,
    ReplayGroup,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutRecoveryLedger,
    RolloutRuntimeState,
    RolloutSiblingRecord,
    RolloutState,
    Trained,
    TrainingProgress,
    admission_id_of,
    fresh_state,
    sample_id_of,
    staged_key,
)
from rollsync.pure.rollout.transitions import apply

__all__ = [
    "Account",
    "DataloaderState",
    "DatumSpec",
    "DropReason",
    "Dropped",
    "FinalizedReward",
    "OpenTrainingStep",
    "PromptGroupPhase",
    "PromptGroupRecoveryRecord",
    "PromptGroupStatus",
    "PromptOutcome",
    "PromptPlace",
    "PromptReference",
    "RecoveryGranularity",
    "ReplayGroup",
    "RolloutAttemptRecord",
    "RolloutAttemptStatus",
    "RolloutEvent",
    "RolloutRecoveryLedger",
    "RolloutRuntimeState",
    "RolloutSiblingRecord",
    "RolloutState",
    "Rule",
    "Trained",
    "TrainingProgress",
    "TransitionError",
    "Violation",
    "account",
    "admission_id_of",
    "apply",
    "check_invariants",
    "fresh_state",
    "place_of",
    "places",
    "sample_id_of",
    "staged_key",
    "why",
]
