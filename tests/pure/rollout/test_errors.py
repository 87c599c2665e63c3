"""Every refusal explains itself, and has an example here."""

from __future__ import annotations

from typing import get_args

import pytest

from rollsync.pure.rollout import errors
from rollsync.pure.rollout.errors import TransitionError, why
from rollsync.pure.rollout.state import PromptGroupPhase, PromptGroupStatus, RolloutAttemptStatus

EXAMPLES: dict[TransitionError, str] = {
    errors.UnknownGroup(group_id="g", needed="ready"): "group g is not ready",
    errors.WrongPhase(
        group_id="g", phase=PromptGroupPhase.RESERVED, needed=PromptGroupPhase.ADMITTED
    ): "group g is reserved, the event needs admitted",
    errors.WrongStatus(
        group_id="g",
        status=PromptGroupStatus.GENERATING,
        needed=(PromptGroupStatus.FINALIZING, PromptGroupStatus.FINALIZATION_UNKNOWN),
    ): "group g is generating, the event needs finalizing or finalization_unknown",
    errors.UnknownSibling(group_id="g", sibling_index=4, sibling_count=2): (
        "group g has 2 siblings, none with index 4"
    ),
    errors.UnknownAttempt(group_id="g", sibling_index=0, attempt_index=5, needed=1): (
        "group g, sibling 0, attempt 5: the only attempt that may be named here is 1"
    ),
    errors.WrongAttemptStatus(
        group_id="g",
        sibling_index=0,
        attempt_index=1,
        status=RolloutAttemptStatus.ABANDONED,
        needed=(RolloutAttemptStatus.DISPATCHED,),
    ): "group g, sibling 0, attempt 1 is abandoned, the event needs dispatched",
    errors.SealedDifferently(
        group_id="g", sibling_index=0, attempt_index=0, fields=("reward", "receipt")
    ): "group g, sibling 0, attempt 0 was sealed before with another reward, receipt",
    errors.NotFinite(group_id="g", what="the reward of sibling 0"): (
        "the reward of sibling 0 of group g is not a finite number"
    ),
    errors.RowKeysRefused(
        group_id="g", keys=tuple(f"k{index}" for index in range(7)), reason="a key is named twice"
    ): "group g may not own rows k0, k1, k2, k3, k4 and 2 more: a key is named twice",
    errors.WrongCount(what="sample ids", count=1, needed=2): "sample ids: 1, needed 2",
    errors.RepeatedIds(ids=("a",)): "named more than once: a",
    errors.IllegalPromptId(prompt_id="a/b"): "prompt id 'a/b' is empty or has a slash",
    errors.PromptHandedOutTwice(prompt_id="p"): "prompt p was handed out before",
    errors.HandOutGap(expected_epoch=0, expected_position=2, epoch=0, position=4): (
        "the dataloader handed out position 4 of epoch 0, expected position 2 of epoch 0"
    ),
    errors.DatasetChanged(what="seed", expected="1", found="2"): (
        "the dataloader's seed is 2, expected 1"
    ),
    errors.CursorJump(dispatch_index=5, needed=3): "dispatch batch 5 is not the next one, 3",
    errors.WrongTargetStep(group_id=None, target_step=2, needed=None): (
        "target step 2 of the batch, needed None"
    ),
    errors.WrongWeightVersion(what="start", weight_version=9, at_least=0, at_most=3): (
        "start weight version 9, must be at least 0 and at most 3"
    ),
    errors.ShortfallRefused(group_id="g", shortfall_step=7, first=1, last=2): (
        "the place of group g may not be missing from target step 7; legal steps: 1 to 2"
    ),
    errors.StepMismatch(step=3, needed=None): (
        "the event is about training step 3, but no step is open"
    ),
    errors.StepAlreadyOpen(step=3): "training step 3 is open and holds claims",
    errors.OptimizerCommitWindow(step=3, window_is_open=True): (
        "the optimizer-commit window of training step 3 is open"
    ),
    errors.GroupClaimed(group_id="g", step=3): "group g is claimed by training step 3",
    errors.RowsNotClearable(keys=("k",)): "rows k are owned or unknown, they may not be cleared",
    errors.TaskIndexBackwards(next_index=1, at_least=2): "task index 1 is before 2",
    errors.NotCanonical(group_id="g"): (
        "group g has no other place, forgetting it would lose its prompt"
    ),
}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_a_refusal_says_why(error: TransitionError) -> None:
    assert why(error) == EXAMPLES[error]


def test_every_refusal_has_an_example() -> None:
    assert {type(error) for error in EXAMPLES} == set(get_args(TransitionError))
