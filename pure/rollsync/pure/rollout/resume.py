"""What a resume does with a captured state.

`plan_resume` says, group by group, what a resume does and why, as events to apply: so a plan can be
printed before anything changes (`explain`), and carrying it out is nothing but `apply`. Rule: a
plan loses no prompt and trains none again, because its events keep the rules of `invariants`.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from rollsync.pure.rollout._attempts import failed_attempts
from rollsync.pure.rollout._parts import staged_keys_of
from rollsync.pure.rollout._sampling import ready_groups
from rollsync.pure.rollout.account import place_of
from rollsync.pure.rollout.decisions import SamplerLimits
from rollsync.pure.rollout.drops import drop_group
from rollsync.pure.rollout.events import (
    AttemptDispatched,
    CanonicalDuplicateDiscarded,
    FinalizationFailed,
    GroupReturnedToReserve,
    ReadyGroupReopened,
    RecoveryRedispatched,
    RolloutEvent,
    RowsCleared,
)
from rollsync.pure.rollout.persistent import values_of
from rollsync.pure.rollout.sampler import PromptGroupSampler
from rollsync.pure.rollout.state import (
    DropReason,
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptPlace,
    RecoveryGranularity,
    RolloutAttemptStatus,
    RolloutState,
)
from rollsync.pure.rollout.transitions import apply


class ReservedGroups(StrEnum):
    """What a resume does with groups that were reserved and not admitted."""

    READMIT = "readmit"
    """They are the next batches, before any new prompt."""
    RETURN_TO_RESERVE = "return_to_reserve"
    """They become spares, for instance because batches are made differently now. No run asks for
    it: it is for those who plan a resume themselves."""


MAX_RECOVERIES = 3
MAX_ATTEMPTS = 3
"""What a run has that is not configured otherwise."""


class ResumePolicy(Struct, frozen=True, kw_only=True):
    """The settings of the resuming run that a plan depends on."""

    sampler: PromptGroupSampler
    limits: SamplerLimits
    load_buffer: bool = True
    """False: ready groups are generated again instead of loaded."""
    reserved: ReservedGroups = ReservedGroups.READMIT
    max_recoveries: int = MAX_RECOVERIES
    """Resumes in a row that may find a group running without one more sibling sealed; after them
    the group is dropped as unrecoverable, for it may be what ends the run."""
    max_failed_attempts: int = MAX_ATTEMPTS
    """Failed attempts of one sibling, over all resumes, after which its group is dropped."""


class KeptReady(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Loaded with its rows; a training step can take it."""

    group_id: str


class ReadyRegenerated(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Ready, but the buffer is not loaded: generated again in its batch."""

    group_id: str


class SiblingsResumed(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Sealed siblings are kept, the others are generated again (none: it goes to finalization)."""

    group_id: str
    sealed: tuple[int, ...]
    regenerate: tuple[int, ...]


class RestartedWhole(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Recovered by prompt group: every sibling is generated again."""

    group_id: str
    discarded: tuple[int, ...]
    """Sealed siblings that this throws away."""


class Readmitted(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Reserved and not admitted: in one of the next batches."""

    group_id: str


class ReturnedToReserve(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Reserved and not admitted: a spare from now on."""

    group_id: str


class DiscardedAsCanonical(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Unfinished by the ledger, but its prompt has this place already."""

    group_id: str
    place: PromptPlace


class DroppedAsUnrecoverable(Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Found running by too many resumes in a row, or with a sibling that failed too often."""

    group_id: str
    recovery_count: int
    failed_attempts: int
    """Those of the sibling that has most."""


GroupPlan = (
    KeptReady
    | ReadyRegenerated
    | SiblingsResumed
    | RestartedWhole
    | Readmitted
    | ReturnedToReserve
    | DiscardedAsCanonical
    | DroppedAsUnrecoverable
)


class ResumePlan(Struct, frozen=True, kw_only=True):
    """What a resume does. `explain` prints it."""

    groups: tuple[GroupPlan, ...]
    """One entry for each group of the captured state."""
    events: tuple[RolloutEvent, ...]
    """Lead from the captured state to `state`."""
    state: RolloutState
    rows_to_load: tuple[str, ...]
    """Exactly the rows that `state` owns, sorted."""
    dispatches: tuple[AttemptDispatched, ...]
    """Attempts to send to the engines first, in this order, each with its event: those of the
    earliest target steps first."""
    to_finalize: tuple[str, ...]
    """Groups whose siblings are all sealed."""
    readmissions: tuple[str, ...]
    """Reserved groups, in the order in which `PromptGroupSampler.admit` takes them."""


def plan_resume(captured: RolloutState, policy: ResumePolicy) -> ResumePlan:
    """What a resume does with a captured state. Total: it answers for every state."""
    planner = _Planner(replace(captured, open_step=None))
    in_order = _in_order(values_of(planner.state.ledger.groups))
    for record in in_order:
        _plan_unfinished(planner, record, policy)
    for group in ready_groups(planner.state):
        if policy.load_buffer and policy.sampler.supports_buffer_checkpoint:
            planner.note(KeptReady(group_id=group.group_id))
        else:
            planner.do(
                ReadyRegenerated(group_id=group.group_id),
                ReadyGroupReopened(group_id=group.group_id),
            )
    garbage = tuple(sorted(planner.state.rows_to_clear))
    if garbage:
        # Rows that nothing owns are not loaded, which is as good as having cleared them.
        planner.do(None, RowsCleared(keys=garbage))
    return _plan_of(planner, in_order)


_UNSETTLED = (PromptGroupStatus.FINALIZING, PromptGroupStatus.FINALIZATION_UNKNOWN)


class _Planner:
    """Collects a plan: each event is applied at once, so that the next decision sees it."""

    def __init__(self, state: RolloutState) -> None:
        self.state = state
        self.groups: list[GroupPlan] = []
        self.events: list[RolloutEvent] = []

    def note(self, group: GroupPlan) -> None:
        self.groups.append(group)

    def do(self, group: GroupPlan | None, *events: RolloutEvent) -> None:
        """Apply `events`; one that is refused would be a bug of this module, not an input."""
        for event in events:
            self.state = apply(self.state, event).unwrap()
            self.events.append(event)
        if group is not None:
            self.groups.append(group)


def _plan_unfinished(
    planner: _Planner, record: PromptGroupRecoveryRecord, policy: ResumePolicy
) -> None:
    group_id = record.group_id
    elsewhere = _other_place(planner.state, record)
    if elsewhere is not None:
        planner.do(
            DiscardedAsCanonical(group_id=group_id, place=elsewhere),
            CanonicalDuplicateDiscarded(group_id=group_id),
        )
        return
    if record.admission_id is None:
        if policy.reserved is ReservedGroups.READMIT:
            planner.note(Readmitted(group_id=group_id))
        else:
            planner.do(
                ReturnedToReserve(group_id=group_id), GroupReturnedToReserve(group_id=group_id)
            )
        return
    if record.status in _UNSETTLED:
        # A save refuses such a state. In one from elsewhere, the replay index is what counts, and
        # it does not have the group: nothing was published.
        planner.do(None, FinalizationFailed(group_id=group_id, outcome_known=True))
    sealed, unsealed = _by_seal(record)
    failed = max(map(failed_attempts, record.siblings))
    poison = record.recovery_count >= policy.max_recoveries or failed >= policy.max_failed_attempts
    if unsealed and poison:
        event = drop_group(
            policy.sampler,
            planner.state,
            group_id,
            reason=DropReason.UNRECOVERABLE,
            # A resumed run syncs the anchor's weights to its engines before anything starts.
            limits=replace(
                policy.limits,
                served_weight_version=planner.state.progress.trainer_version,
            ),
        )
        dropped = DroppedAsUnrecoverable(
            group_id=group_id, recovery_count=record.recovery_count, failed_attempts=failed
        )
        planner.do(dropped, event)
        return
    whole = bool(unsealed) and record.granularity is RecoveryGranularity.PROMPT_GROUP
    what: GroupPlan = (
        RestartedWhole(group_id=group_id, discarded=sealed)
        if whole
        else SiblingsResumed(group_id=group_id, sealed=sealed, regenerate=unsealed)
    )
    if whole or _has_ended_attempts(record):
        planner.do(what, RecoveryRedispatched(group_id=group_id, restart_whole=whole))
    else:
        planner.note(what)


def _other_place(state: RolloutState, record: PromptGroupRecoveryRecord) -> PromptPlace | None:
    """Where the prompt is beside the ledger; None in every state that `apply` can reach."""
    if record.group_id not in state.replay and record.prompt.prompt_id not in state.outcomes:
        return None
    others = state.ledger.groups.discard(record.group_id)
    return place_of(replace(state, ledger=replace(state.ledger, groups=others)), record.group_id)


def _by_seal(record: PromptGroupRecoveryRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the sealed siblings, and of the others."""
    sealed: list[int] = []
    unsealed: list[int] = []
    for sibling in record.siblings:
        done = sibling.attempts[-1].status is RolloutAttemptStatus.SEALED
        (sealed if done else unsealed).append(sibling.index)
    return tuple(sealed), tuple(unsealed)


def _has_ended_attempts(record: PromptGroupRecoveryRecord) -> bool:
    """Whether a sibling's last attempt can go on no more, and another has to be reserved."""
    for sibling in record.siblings:
        status = sibling.attempts[-1].status
        if (
            status is not RolloutAttemptStatus.RESERVED
            and status is not RolloutAttemptStatus.SEALED
        ):
            return True
    return False


def _in_order(records: list[PromptGroupRecoveryRecord]) -> list[PromptGroupRecoveryRecord]:
    """The order of redispatch: earliest target step (or weights), then order of hand-out."""

    def urgency(record: PromptGroupRecoveryRecord) -> tuple[bool, int, int, int]:
        due = record.target_step if record.target_step is not None else record.start_weight_version
        return (due is None, due or 0, record.prompt.epoch, record.prompt.position)

    return sorted(records, key=urgency)


def _after(
    state: RolloutState, before: list[PromptGroupRecoveryRecord]
) -> list[PromptGroupRecoveryRecord]:
    """The unfinished groups in order. Sorting is what costs, so the order of `before` is kept
    where nothing came (a replacement, a group generated again) that it does not have."""
    groups = state.ledger.groups
    kept = [now for was in before if (now := groups.get(was.group_id)) is not None]
    return kept if len(kept) == len(groups) else _in_order(values_of(groups))


def _plan_of(planner: _Planner, before: list[PromptGroupRecoveryRecord]) -> ResumePlan:
    state = planner.state
    rows = [key for group in values_of(state.replay) for key in group.sample_ids]
    dispatches: list[AttemptDispatched] = []
    to_finalize: list[str] = []
    readmissions: list[PromptGroupRecoveryRecord] = []
    for record in _after(state, before):
        if record.phase is PromptGroupPhase.RESERVED:
            readmissions.append(record)
            continue
        rows.extend(staged_keys_of(record))
        if record.status is PromptGroupStatus.READY_TO_FINALIZE:
            to_finalize.append(record.group_id)
            continue
        for sibling in record.siblings:
            last = sibling.attempts[-1]
            if last.status is RolloutAttemptStatus.RESERVED:
                dispatches.append(
                    AttemptDispatched(
                        group_id=record.group_id,
                        sibling_index=sibling.index,
                        attempt_index=last.index,
                    )
                )
    return ResumePlan(
        groups=tuple(planner.groups),
        events=tuple(planner.events),
        state=state,
        rows_to_load=tuple(sorted(rows)),
        dispatches=tuple(dispatches),
        to_finalize=tuple(to_finalize),
        readmissions=tuple(record.group_id for record in readmissions),
    )
