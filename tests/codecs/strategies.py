"""Hypothesis strategies for rollout states: every field free within its schema."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st
from rpds import HashTrieMap, HashTrieSet, Queue

from rollsync.pure.rollout.state import (
    DataloaderState,
    Dropped,
    DropReason,
    FinalizedReward,
    OpenTrainingStep,
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptOutcome,
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
)

K = TypeVar("K")
V = TypeVar("V")

naturals = st.integers(0, 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def tuples(members: st.SearchStrategy[V]) -> st.SearchStrategy[tuple[V, ...]]:
    """Tuples of up to three members."""
    return st.lists(members, max_size=3).map(tuple)


def maps(
    keys: st.SearchStrategy[K], values: st.SearchStrategy[V]
) -> st.SearchStrategy[HashTrieMap[K, V]]:
    """Persistent maps of up to three entries."""
    return st.dictionaries(keys, values, max_size=3).map(HashTrieMap)


def by_group_id(
    groups: list[PromptGroupRecoveryRecord],
) -> HashTrieMap[str, PromptGroupRecoveryRecord]:
    return HashTrieMap({group.group_id: group for group in groups})


def ready_by_group_id(groups: list[ReplayGroup]) -> HashTrieMap[str, ReplayGroup]:
    return HashTrieMap({group.group_id: group for group in groups})


prompts = st.builds(
    PromptReference,
    prompt_id=texts,
    sample_id=texts,
    task=texts,
    epoch=naturals,
    position=naturals,
    content_digest=texts,
)
rewards = st.builds(FinalizedReward, sibling_index=naturals, reward=floats)
attempts = st.builds(
    RolloutAttemptRecord,
    index=naturals,
    status=st.sampled_from(RolloutAttemptStatus),
    receipt=st.none() | texts,
    reward=st.none() | floats,
    masked=st.none() | st.booleans(),
    staged_keys=tuples(texts),
)
siblings = st.builds(RolloutSiblingRecord, index=naturals, attempts=tuples(attempts))
groups = st.builds(
    PromptGroupRecoveryRecord,
    group_id=texts,
    admission_id=st.none() | texts,
    prompt=prompts,
    granularity=st.sampled_from(RecoveryGranularity),
    expected_generations=naturals,
    target_step=st.none() | naturals,
    start_weight_version=st.none() | naturals,
    phase=st.sampled_from(PromptGroupPhase),
    status=st.sampled_from(PromptGroupStatus),
    siblings=tuples(siblings),
    recovery_count=naturals,
)
ready_groups = st.builds(
    ReplayGroup,
    group_id=texts,
    admission_id=texts,
    granularity=st.sampled_from(RecoveryGranularity),
    prompt=prompts,
    sample_ids=tuples(texts),
    start_weight_version=naturals,
    end_weight_version=naturals,
    target_step=st.none() | naturals,
    lengths=tuples(naturals),
    rewards=tuples(floats),
    masked=tuples(st.booleans()),
    commit_index=naturals,
)
outcomes: st.SearchStrategy[PromptOutcome] = st.builds(Trained, step=naturals) | st.builds(
    Dropped, step=naturals, reason=st.sampled_from(DropReason)
)
ledgers = st.builds(RolloutRecoveryLedger, groups=st.lists(groups, max_size=3).map(by_group_id))
states = st.builds(
    RolloutState,
    progress=st.builds(
        TrainingProgress, train_steps=naturals, trainer_version=naturals, current_epoch=naturals
    ),
    dataloader_state=st.builds(
        DataloaderState,
        epoch=naturals,
        position=naturals,
        dataset_digest=texts,
        seed=st.integers(-(2**63), 2**63 - 1),
    ),
    sampler_dispatch_index=st.integers(-1, 2**63 - 1),
    next_nemo_gym_task_index=naturals,
    runtime=st.builds(
        RolloutRuntimeState,
        replacement_reserve=st.lists(prompts, max_size=3).map(Queue),
        batch_shortfall=maps(naturals, naturals),
        sampler_stamps_target_steps=st.booleans(),
        finalizer_metrics_by_group=maps(texts, maps(texts, floats)),
        finalizer_rewards_by_group=maps(texts, tuples(rewards)),
    ),
    ledger=ledgers,
    replay=st.lists(ready_groups, max_size=3).map(ready_by_group_id),
    next_commit_index=naturals,
    open_step=st.none()
    | st.builds(
        OpenTrainingStep,
        step=naturals,
        group_ids=tuples(texts),
        optimizer_commit_open=st.booleans(),
    ),
    rows_to_clear=st.lists(texts, max_size=3).map(HashTrieSet),
    outcomes=maps(texts, outcomes),
)
