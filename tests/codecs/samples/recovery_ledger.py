"""Sample values of `rollout.recovery-ledger`."""

from __future__ import annotations

import sys
from typing import Final

from rpds import HashTrieMap

from rollsync.pure.rollout.state import (
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptReference,
    RecoveryGranularity,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutRecoveryLedger,
    RolloutSiblingRecord,
)

LARGEST: Final = 2**63 - 1


def prompt(number: int) -> PromptReference:
    """A prompt with every field filled."""
    return PromptReference(
        prompt_id=f"epoch-0/prompt-{number}",
        sample_id=f"sample-{number}",
        task="countdown",
        epoch=0,
        position=number,
        content_digest=f"{number:064x}",
    )


def ledger(*groups: PromptGroupRecoveryRecord) -> RolloutRecoveryLedger:
    """A ledger of these groups."""
    return RolloutRecoveryLedger(groups=HashTrieMap({group.group_id: group for group in groups}))


RESERVED: Final = PromptGroupRecoveryRecord(
    group_id="group-b",
    admission_id=None,
    prompt=prompt(1),
    granularity=RecoveryGranularity.PROMPT_GROUP,
    expected_generations=2,
    target_step=None,
    start_weight_version=None,
    phase=PromptGroupPhase.RESERVED,
    status=PromptGroupStatus.GENERATING,
    siblings=(),
)
ADMITTED: Final = PromptGroupRecoveryRecord(
    group_id="group-a",
    admission_id="admission-7",
    prompt=prompt(2),
    granularity=RecoveryGranularity.SIBLING,
    expected_generations=2,
    target_step=3,
    start_weight_version=2,
    phase=PromptGroupPhase.ADMITTED,
    status=PromptGroupStatus.GENERATING,
    siblings=(
        RolloutSiblingRecord(
            index=0,
            attempts=(
                RolloutAttemptRecord(index=0, status=RolloutAttemptStatus.FAILED),
                RolloutAttemptRecord(
                    index=1,
                    status=RolloutAttemptStatus.SEALED,
                    receipt="5a" * 32,
                    reward=0.1,
                    masked=True,
                    staged_keys=("group-a/0/0", "group-a/0/1"),
                ),
            ),
        ),
        RolloutSiblingRecord(
            index=1,
            attempts=(
                RolloutAttemptRecord(index=0, status=RolloutAttemptStatus.ABANDONED),
                RolloutAttemptRecord(index=1, status=RolloutAttemptStatus.DISPATCHED),
            ),
        ),
    ),
    recovery_count=1,
)


def _sealed(group_id: str, reward: float, number: int) -> PromptGroupRecoveryRecord:
    return PromptGroupRecoveryRecord(
        group_id=group_id,
        admission_id="",
        prompt=PromptReference(
            prompt_id="",
            sample_id="",
            task="",
            epoch=number,
            position=number,
            content_digest="",
        ),
        granularity=RecoveryGranularity.SIBLING,
        expected_generations=number,
        target_step=number,
        start_weight_version=number,
        phase=PromptGroupPhase.ADMITTED,
        status=PromptGroupStatus.READY_TO_FINALIZE,
        siblings=(
            RolloutSiblingRecord(
                index=0,
                attempts=(
                    RolloutAttemptRecord(
                        index=number,
                        status=RolloutAttemptStatus.SEALED,
                        receipt="",
                        reward=reward,
                        masked=False,
                        staged_keys=("",),
                    ),
                ),
            ),
        ),
        recovery_count=number,
    )


SAMPLES: Final = {
    "full": ledger(RESERVED, ADMITTED),
    "empty": ledger(),
    "extremes": ledger(
        _sealed("", sys.float_info.max, LARGEST),
        _sealed("a", -sys.float_info.max, 0),
        _sealed("b", 5e-324, 0),
        _sealed("c", -0.0, 0),
    ),
    "non-ascii": ledger(
        PromptGroupRecoveryRecord(
            group_id="groupe-été",
            admission_id="接纳-𝄞",
            prompt=PromptReference(
                prompt_id="프롬프트",
                sample_id="пример\x00\n",
                task="数え上げ",
                epoch=0,
                position=0,
                content_digest="\N{RIGHT-TO-LEFT MARK}",
            ),
            granularity=RecoveryGranularity.SIBLING,
            expected_generations=1,
            target_step=None,
            start_weight_version=0,
            phase=PromptGroupPhase.ADMITTED,
            status=PromptGroupStatus.FINALIZING,
            siblings=(),
        ),
    ),
}
