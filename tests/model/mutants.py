"""Planted mistakes: each is a plausible slip in one place of the core, put where the core was.

They show that the exploration can fail, and how its counterexamples read.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace
from returns.pipeline import is_successful
from returns.result import Result
from rpds import HashTrieMap, HashTrieSet, Queue

from rollsync.pure.rollout import (
    BuiltInSampler,
    Capture,
    CaptureRefused,
    CheckpointKind,
    InOrderSampler,
    PromptGroupPhase,
    PromptReference,
    ReadyFirstSampler,
    ResumePlan,
    ResumePolicy,
    RolloutEvent,
    RolloutRecoveryLedger,
    RolloutState,
    TransitionError,
    WindowedSampler,
    apply,
    capture,
    plan_resume,
)
from rollsync.pure.rollout.events import (
    BatchAdmitted,
    BatchReserved,
    GroupCommitted,
    GroupDropped,
    GroupsClaimed,
    RecoveryRedispatched,
    SiblingSealed,
    StepCommitted,
)
from tests.model.world import Config, Machine

OnState = Callable[[RolloutState], RolloutState]
OnEvent = Callable[[RolloutState, RolloutState], RolloutState]


class Mutant(Struct, frozen=True, kw_only=True):
    """A mistake, the smallest world that shows it, and what the oracle must say."""

    name: str
    machine: Machine
    verdict: str
    """Part of the last line of the counterexample."""
    sampler: BuiltInSampler = InOrderSampler()
    prompts: int = 2
    siblings: int = 1
    batch: int = 1
    faults: int = 0
    spares: int = 0
    crashes: int = 2

    @property
    def config(self) -> Config:
        return Config(
            sampler=self.sampler,
            prompts=self.prompts,
            siblings=self.siblings,
            batch=self.batch,
            faults=self.faults,
            spares=self.spares,
            crashes=self.crashes,
        )


def after_event(
    kind: type[RolloutEvent], slip: Callable[[RolloutState, RolloutState], RolloutState]
) -> Machine:
    """A core that slips when it applies one kind of event: `slip(before, after)`."""

    def slipping(state: RolloutState, event: RolloutEvent) -> Result[RolloutState, TransitionError]:
        result = apply(state, event)
        if isinstance(event, kind):
            return result.map(lambda after: slip(state, after))
        return result

    return Machine(apply=slipping)


def when_captured(slip: OnState) -> Machine:
    """A core that saves something else than the state of the cut."""

    def slipping(state: RolloutState, kind: CheckpointKind) -> Result[Capture, CaptureRefused]:
        return capture(state, kind).map(lambda kept: replace(kept, state=slip(kept.state)))

    return Machine(capture=slipping)


def when_resumed(slip: OnState) -> Machine:
    """A core that makes something else of a saved state than its plan says."""

    def slipping(state: RolloutState, policy: ResumePolicy) -> ResumePlan:
        plan = plan_resume(state, policy)
        return replace(plan, state=slip(plan.state))

    return Machine(plan_resume=slipping)


def _moved_dataloader(by: int) -> OnState:
    def slip(state: RolloutState) -> RolloutState:
        place = state.dataloader_state
        return replace(state, dataloader_state=replace(place, position=max(0, place.position + by)))

    return slip


def _without_reserve(state: RolloutState) -> RolloutState:
    empty: Queue[PromptReference] = Queue()
    return replace(state, runtime=replace(state.runtime, replacement_reserve=empty))


def _without_shortfall(state: RolloutState) -> RolloutState:
    none: HashTrieMap[int, int] = HashTrieMap()
    return replace(state, runtime=replace(state.runtime, batch_shortfall=none))


def _without_replay(state: RolloutState) -> RolloutState:
    return replace(state, replay=HashTrieMap())


def _without_reserved(state: RolloutState) -> RolloutState:
    groups = state.ledger.groups
    for key, record in state.ledger.groups.items():
        if record.phase is PromptGroupPhase.RESERVED:
            groups = groups.remove(key)
    return replace(state, ledger=RolloutRecoveryLedger(groups=groups))


def _claims_as_trained(
    state: RolloutState, kind: CheckpointKind
) -> Result[Capture, CaptureRefused]:
    """Claimed groups left out of the replay index, as if the step had taken them for good."""
    claimed = () if state.open_step is None else state.open_step.group_ids

    def slip(kept: Capture) -> Capture:
        replay = kept.state.replay
        for group_id in claimed:
            replay = replay.remove(group_id)
        rows = tuple(key for group in replay.values() for key in group.sample_ids)
        return replace(kept, state=replace(kept.state, replay=replay), replay_rows=rows)

    return capture(state, kind).map(slip)


def _capture_in_window(
    state: RolloutState, kind: CheckpointKind
) -> Result[Capture, CaptureRefused]:
    """No look at the optimizer-commit window or at open claims."""
    return capture(replace(state, open_step=None), kind)


def _without_staged_rows(
    state: RolloutState, kind: CheckpointKind
) -> Result[Capture, CaptureRefused]:
    return capture(state, kind).map(lambda kept: replace(kept, staging_rows=()))


def _both_canonical_and_in_flight(before: RolloutState, after: RolloutState) -> RolloutState:
    return replace(after, ledger=before.ledger)


def _rows_of_published_groups_cleared(before: RolloutState, after: RolloutState) -> RolloutState:
    new = [group for key, group in after.replay.items() if key not in before.replay]
    rows = after.rows_to_clear.update(key for group in new for key in group.sample_ids)
    return replace(after, rows_to_clear=rows)


def _without_new_outcomes(before: RolloutState, after: RolloutState) -> RolloutState:
    return replace(after, outcomes=before.outcomes)


def _shortfall_not_recorded(before: RolloutState, after: RolloutState) -> RolloutState:
    return replace(
        after, runtime=replace(after.runtime, batch_shortfall=before.runtime.batch_shortfall)
    )


def _replacement_stays_in_reserve(before: RolloutState, after: RolloutState) -> RolloutState:
    reserve = before.runtime.replacement_reserve
    return replace(after, runtime=replace(after.runtime, replacement_reserve=reserve))


def _trained_groups_stay_ready(before: RolloutState, after: RolloutState) -> RolloutState:
    return replace(after, replay=before.replay, rows_to_clear=before.rows_to_clear)


def _cursor_not_advanced(before: RolloutState, after: RolloutState) -> RolloutState:
    return replace(after, sampler_dispatch_index=before.sampler_dispatch_index)


def _dataloader_not_advanced(before: RolloutState, after: RolloutState) -> RolloutState:
    return replace(after, dataloader_state=before.dataloader_state)


def _claims_forgotten(before: RolloutState, after: RolloutState) -> RolloutState:
    return replace(after, open_step=None)


def _seal_forgets_rows(before: RolloutState, after: RolloutState) -> RolloutState:
    garbage = [
        key
        for record in after.ledger.groups.values()
        for sibling in record.siblings
        for key in sibling.attempts[-1].staged_keys
    ]
    return replace(after, rows_to_clear=after.rows_to_clear.update(garbage))


def _cursor(value: Callable[[int], int]) -> OnState:
    return lambda state: replace(state, sampler_dispatch_index=value(state.sampler_dispatch_index))


def _steps_forgotten(state: RolloutState) -> RolloutState:
    return replace(state, progress=replace(state.progress, train_steps=0))


def _outcomes_forgotten(state: RolloutState) -> RolloutState:
    return replace(state, outcomes=HashTrieMap())


def _running_attempts_kept(state: RolloutState, policy: ResumePolicy) -> ResumePlan:
    """Nobody abandons what ran before the crash: the redispatch is left out."""
    plan = plan_resume(state, policy)
    kept = state
    for event in plan.events:
        if not isinstance(event, RecoveryRedispatched):
            kept = apply(kept, event).value_or(kept)
    legal = tuple(event for event in plan.dispatches if is_successful(apply(kept, event)))
    return replace(plan, state=kept, dispatches=legal)


def _stale_garbage_kept(state: RolloutState) -> RolloutState:
    """Rows of trained groups still owned: the clear of a later batch takes live rows along."""
    live = [key for group in state.replay.values() for key in group.sample_ids]
    return replace(state, rows_to_clear=HashTrieSet(live))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="the dataloader's position is saved too early",
        machine=when_captured(_moved_dataloader(-1)),
        verdict="will hand it out again",
    ),
    Mutant(
        name="the dataloader's position is saved too late",
        machine=when_captured(_moved_dataloader(+1)),
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="the dataloader moves on without its position being recorded",
        machine=after_event(BatchReserved, _dataloader_not_advanced),
        verdict="will hand it out again",
    ),
    Mutant(
        name="claimed groups count as trained when they are saved",
        machine=Machine(capture=_claims_as_trained),
        verdict="there are 1 groups fewer",
    ),
    Mutant(
        name="claimed groups count as trained, under a policy that does not count batches",
        machine=Machine(capture=_claims_as_trained),
        sampler=WindowedSampler(),
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="the trainer saves inside the optimizer-commit window",
        machine=Machine(capture=_capture_in_window),
        verdict="the state counts 0 steps, the weights had 1",
    ),
    Mutant(
        name="the reserve is forgotten by the save",
        machine=when_captured(_without_reserve),
        spares=1,
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="the shortfall is not restored",
        machine=when_resumed(_without_shortfall),
        faults=1,
        batch=2,
        crashes=1,
        verdict="deadlock",
    ),
    Mutant(
        name="the shortfall is not saved",
        machine=when_captured(_without_shortfall),
        faults=1,
        batch=2,
        verdict="groups fewer than batches",
    ),
    Mutant(
        name="a ledger group is both canonical and in flight",
        machine=after_event(GroupCommitted, _both_canonical_and_in_flight),
        verdict="is in 2 places",
    ),
    Mutant(
        name="the buffer is not loaded, and its prompts are not generated again",
        machine=when_resumed(_without_replay),
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="reserved groups are not restored",
        machine=when_resumed(_without_reserved),
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="staged rows are not saved",
        machine=Machine(capture=_without_staged_rows),
        siblings=2,
        verdict="owns rows that are not there",
    ),
    Mutant(
        name="published rows are cleared with the staged ones",
        machine=after_event(GroupCommitted, _rows_of_published_groups_cleared),
        verdict="waits to be cleared",
    ),
    Mutant(
        name="a sealed sibling's rows are taken for garbage",
        machine=after_event(SiblingSealed, _seal_forgets_rows),
        verdict="waits to be cleared",
    ),
    Mutant(
        name="a dropped prompt leaves no reason",
        machine=after_event(GroupDropped, _without_new_outcomes),
        faults=1,
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="a drop without a replacement records no shortfall",
        machine=after_event(GroupDropped, _shortfall_not_recorded),
        faults=1,
        crashes=0,
        verdict="deadlock",
    ),
    Mutant(
        name="a replacement stays in the reserve",
        machine=after_event(GroupDropped, _replacement_stays_in_reserve),
        faults=1,
        spares=1,
        verdict="is in 2 places",
    ),
    Mutant(
        name="trained groups stay in the replay index",
        machine=after_event(StepCommitted, _trained_groups_stay_ready),
        sampler=ReadyFirstSampler(),
        verdict="is in 2 places",
    ),
    Mutant(
        name="trained prompts are not accounted for",
        machine=after_event(StepCommitted, _without_new_outcomes),
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="the dispatch cursor does not move with the admission",
        machine=after_event(BatchAdmitted, _cursor_not_advanced),
        verdict="rule stamps is broken",
    ),
    Mutant(
        name="the dispatch cursor is saved one batch behind",
        machine=when_captured(_cursor(lambda index: max(-1, index - 1))),
        verdict="rule stamps is broken",
    ),
    Mutant(
        name="the dispatch cursor is saved one batch ahead",
        machine=when_captured(_cursor(lambda index: index + 1)),
        verdict="groups fewer than batches",
    ),
    Mutant(
        name="the step counter starts again at 0",
        machine=when_resumed(_steps_forgotten),
        verdict="the state counts 0 steps, the weights had 1",
    ),
    Mutant(
        name="what was trained is forgotten by the save",
        machine=when_captured(_outcomes_forgotten),
        verdict="handed out and is nowhere",
    ),
    Mutant(
        name="running attempts outlive the crash in the ledger",
        machine=Machine(plan_resume=_running_attempts_kept),
        verdict="is waited for, and nobody generates it",
    ),
    Mutant(
        name="a training step's claims are not recorded",
        machine=after_event(GroupsClaimed, _claims_forgotten),
        verdict="deadlock",
    ),
    Mutant(
        name="live rows are cleared after a resume",
        machine=when_resumed(_stale_garbage_kept),
        verdict="waits to be cleared",
    ),
)
