"""Sample values of `rollout.state`."""

from __future__ import annotations

import sys
from typing import Final

from rpds import HashTrieMap, HashTrieSet, Queue

from rollsync.pure.rollout.state import (
    DataloaderState,
    Dropped,
    DropReason,
    FinalizedReward,
    OpenTrainingStep,
    PromptOutcome,
    PromptReference,
    RecoveryGranularity,
    ReplayGroup,
    RolloutRuntimeState,
    RolloutState,
    Trained,
    TrainingProgress,
    fresh_state,
)
from tests.codecs.samples.recovery_ledger import ADMITTED, LARGEST, RESERVED, ledger, prompt


def _ready(group_id: str, number: int) -> ReplayGroup:
    return ReplayGroup(
        group_id=group_id,
        admission_id="admission-1",
        granularity=RecoveryGranularity.SIBLING,
        prompt=prompt(number),
        sample_ids=(f"{group_id}/0", f"{group_id}/1"),
        start_weight_version=1,
        end_weight_version=2,
        target_step=number,
        lengths=(512, 37),
        rewards=(1.0, -0.25),
        masked=(False, True),
        commit_index=number,
    )


OUTCOMES: Final[dict[str, PromptOutcome]] = {
    "epoch-0/prompt-5": Dropped(step=3, reason=DropReason.STALE),
    "epoch-0/prompt-6": Trained(step=2),
    "epoch-0/prompt-7": Dropped(step=1, reason=DropReason.UNRECOVERABLE),
}
FULL: Final = RolloutState(
    progress=TrainingProgress(train_steps=3, trainer_version=3, current_epoch=1),
    dataloader_state=DataloaderState(epoch=1, position=12, dataset_digest="d4" * 32, seed=42),
    sampler_dispatch_index=5,
    next_nemo_gym_task_index=17,
    runtime=RolloutRuntimeState(
        replacement_reserve=Queue([prompt(9), prompt(8)]),
        batch_shortfall=HashTrieMap({10: 1, 9: 2}),
        sampler_stamps_target_steps=True,
        finalizer_metrics_by_group=HashTrieMap(
            {
                "group-d": HashTrieMap({"turns": 3.0, "kl": 0.001953125, "length": 549.0}),
                "group-c": HashTrieMap(),
            }
        ),
        finalizer_rewards_by_group=HashTrieMap(
            {
                "group-d": (
                    FinalizedReward(sibling_index=0, reward=1.0),
                    FinalizedReward(sibling_index=1, reward=-0.25),
                ),
                "group-c": (),
            }
        ),
    ),
    ledger=ledger(RESERVED, ADMITTED),
    replay=HashTrieMap({"group-d": _ready("group-d", 4), "group-c": _ready("group-c", 3)}),
    next_commit_index=5,
    open_step=OpenTrainingStep(step=4, group_ids=("group-d", "group-c")),
    rows_to_clear=HashTrieSet(["group-z/1", "group-z/0"]),
    outcomes=HashTrieMap(OUTCOMES),
)
EXTREMES: Final = RolloutState(
    progress=TrainingProgress(train_steps=LARGEST, trainer_version=LARGEST, current_epoch=LARGEST),
    dataloader_state=DataloaderState(
        epoch=LARGEST, position=LARGEST, dataset_digest="", seed=-LARGEST - 1
    ),
    sampler_dispatch_index=-1,
    next_nemo_gym_task_index=LARGEST,
    runtime=RolloutRuntimeState(
        replacement_reserve=Queue(),
        batch_shortfall=HashTrieMap({0: LARGEST, LARGEST: 0}),
        sampler_stamps_target_steps=False,
        finalizer_metrics_by_group=HashTrieMap(
            {"": HashTrieMap({"": sys.float_info.min, "zero": -0.0})}
        ),
        finalizer_rewards_by_group=HashTrieMap(
            {"": (FinalizedReward(sibling_index=LARGEST, reward=-sys.float_info.max),)}
        ),
    ),
    ledger=ledger(),
    replay=HashTrieMap(),
    next_commit_index=LARGEST,
    open_step=OpenTrainingStep(step=LARGEST, group_ids=(), optimizer_commit_open=True),
    rows_to_clear=HashTrieSet([""]),
    outcomes=HashTrieMap({"": Trained(step=LARGEST)}),
)
EMPTY: Final = fresh_state(dataset_digest="", seed=0, sampler_stamps_target_steps=False)
NON_ASCII: Final = RolloutState(
    progress=EMPTY.progress,
    dataloader_state=EMPTY.dataloader_state,
    sampler_dispatch_index=0,
    next_nemo_gym_task_index=0,
    runtime=RolloutRuntimeState(
        replacement_reserve=Queue(
            [
                PromptReference(
                    prompt_id="프롬프트",
                    sample_id="пример",
                    task="数え上げ",
                    epoch=0,
                    position=0,
                    content_digest="",
                )
            ]
        ),
        batch_shortfall=HashTrieMap(),
        finalizer_metrics_by_group=HashTrieMap(
            {"é": HashTrieMap({"𝄞": 1.0, "longueur": 2.0, "é": 3.0})}
        ),
        finalizer_rewards_by_group=HashTrieMap(),
    ),
    ledger=EMPTY.ledger,
    replay=EMPTY.replay,
    next_commit_index=0,
    open_step=None,
    rows_to_clear=HashTrieSet(["\uffff", "\U00010000", "z", "é"]),
    outcomes=HashTrieMap(),
)
SAMPLES: Final = {"full": FULL, "empty": EMPTY, "extremes": EXTREMES, "non-ascii": NON_ASCII}
