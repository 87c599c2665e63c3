"""Why an event was refused, as values.

Each kind of refusal is a frozen struct that holds what a person needs to see, and `why` says it in
a sentence. The shell raises them inside one exception class; nothing here is an exception.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct

from rollsync.pure.rollout.state import PromptGroupPhase, PromptGroupStatus, RolloutAttemptStatus


class UnknownGroup(Struct, frozen=True, kw_only=True, tag=True):
    """The event names a group that is not where the event needs it."""

    group_id: str
    needed: str
    """Where it would have to be: `unfinished`, `ready`, `unfinished or ready`."""


class WrongPhase(Struct, frozen=True, kw_only=True, tag=True):
    """The group is reserved where it must be admitted, or the other way round."""

    group_id: str
    phase: PromptGroupPhase
    needed: PromptGroupPhase


class WrongStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The group's result is at another stage."""

    group_id: str
    status: PromptGroupStatus
    needed: tuple[PromptGroupStatus, ...]


class UnknownSibling(Struct, frozen=True, kw_only=True, tag=True):
    """The group has fewer siblings."""

    group_id: str
    sibling_index: int
    sibling_count: int


class UnknownAttempt(Struct, frozen=True, kw_only=True, tag=True):
    """Attempts are contiguous from 0; this index is neither the last one nor the next."""

    group_id: str
    sibling_index: int
    attempt_index: int
    needed: int


class WrongAttemptStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The attempt's life is at another point (for instance: a result of an abandoned attempt)."""

    group_id: str
    sibling_index: int
    attempt_index: int
    status: RolloutAttemptStatus
    needed: tuple[RolloutAttemptStatus, ...]


class SealedDifferently(Struct, frozen=True, kw_only=True, tag=True):
    """The attempt was sealed before, with other data."""

    group_id: str
    sibling_index: int
    attempt_index: int
    fields: tuple[str, ...]


class NotFinite(Struct, frozen=True, kw_only=True, tag=True):
    """NaN or an infinity, where a number is to be saved: it equals nothing, not even itself."""

    group_id: str
    what: str


class RowKeysRefused(Struct, frozen=True, kw_only=True, tag=True):
    """Row keys that the group may not own: foreign, repeated, owned already, or being cleared."""

    group_id: str
    keys: tuple[str, ...]
    reason: str


class WrongCount(Struct, frozen=True, kw_only=True, tag=True):
    """A collection of the event has another length than the group or the state needs."""

    what: str
    count: int
    needed: int


class RepeatedIds(Struct, frozen=True, kw_only=True, tag=True):
    """The event names something twice."""

    ids: tuple[str, ...]


class IllegalPromptId(Struct, frozen=True, kw_only=True, tag=True):
    """A prompt id is empty or has a slash (row keys use it as a separator)."""

    prompt_id: str


class PromptHandedOutTwice(Struct, frozen=True, kw_only=True, tag=True):
    """The prompt id has a place already: a dataloader that went back, or ids that repeat."""

    prompt_id: str


class HandOutGap(Struct, frozen=True, kw_only=True, tag=True):
    """The dataloader skipped prompts, or went back."""

    expected_epoch: int
    expected_position: int
    epoch: int
    position: int


class DatasetChanged(Struct, frozen=True, kw_only=True, tag=True):
    """The dataloader's dataset or seed is another one than the state's."""

    what: str
    expected: str
    found: str


class CursorJump(Struct, frozen=True, kw_only=True, tag=True):
    """Dispatch batches are admitted one by one."""

    dispatch_index: int
    needed: int


class WrongTargetStep(Struct, frozen=True, kw_only=True, tag=True):
    """The target step is not the one that the policy's stamping rule gives."""

    group_id: str | None
    target_step: int | None
    needed: int | None


class WrongWeightVersion(Struct, frozen=True, kw_only=True, tag=True):
    """A weight version from the future, from the past, or one that skips."""

    what: str
    weight_version: int
    at_least: int
    at_most: int | None


class ShortfallRefused(Struct, frozen=True, kw_only=True, tag=True):
    """The missing group may not be counted there: it must be a batch not yet claimed."""

    group_id: str
    shortfall_step: int | None
    first: int | None
    last: int | None


class StepMismatch(Struct, frozen=True, kw_only=True, tag=True):
    """The event is about another training step than the one that is (or would be) open."""

    step: int
    needed: int | None
    """None: no step is open."""


class StepAlreadyOpen(Struct, frozen=True, kw_only=True, tag=True):
    """Another training step holds claims."""

    step: int


class OptimizerCommitWindow(Struct, frozen=True, kw_only=True, tag=True):
    """The optimizer-commit window is open where it must be closed, or the other way round."""

    step: int
    window_is_open: bool


class GroupClaimed(Struct, frozen=True, kw_only=True, tag=True):
    """The open training step holds the group."""

    group_id: str
    step: int


class RowsNotClearable(Struct, frozen=True, kw_only=True, tag=True):
    """Rows that something still owns, or that the state does not know."""

    keys: tuple[str, ...]


class TaskIndexBackwards(Struct, frozen=True, kw_only=True, tag=True):
    """The environment's task index may not go back: it would hand out an index twice."""

    next_index: int
    at_least: int


class NotCanonical(Struct, frozen=True, kw_only=True, tag=True):
    """The group is unfinished and nowhere else: forgetting it would lose its prompt."""

    group_id: str


TransitionError = (
    UnknownGroup
    | WrongPhase
    | WrongStatus
    | UnknownSibling
    | UnknownAttempt
    | WrongAttemptStatus
    | SealedDifferently
    | NotFinite
    | RowKeysRefused
    | WrongCount
    | RepeatedIds
    | IllegalPromptId
    | PromptHandedOutTwice
    | HandOutGap
    | DatasetChanged
    | CursorJump
    | WrongTargetStep
    | WrongWeightVersion
    | ShortfallRefused
    | StepMismatch
    | StepAlreadyOpen
    | OptimizerCommitWindow
    | GroupClaimed
    | RowsNotClearable
    | TaskIndexBackwards
    | NotCanonical
)


def why(error: TransitionError) -> str:
    """The refusal as a sentence."""
    match error:
        case UnknownGroup():
            return f"group {error.group_id} is not {error.needed}"
        case WrongPhase():
            return f"group {error.group_id} is {error.phase}, the event needs {error.needed}"
        case WrongStatus():
            return f"group {error.group_id} is {error.status}, the event needs {_or(error.needed)}"
        case UnknownSibling():
            return (
                f"group {error.group_id} has {error.sibling_count} siblings, "
                f"none with index {error.sibling_index}"
            )
        case NotFinite():
            return f"{error.what} of group {error.group_id} is not a finite number"
        case RowKeysRefused():
            return f"group {error.group_id} may not own rows {_list(error.keys)}: {error.reason}"
        case UnknownAttempt() | WrongAttemptStatus() | SealedDifferently():
            return _why_attempt(error)
        case (
            WrongCount()
            | RepeatedIds()
            | IllegalPromptId()
            | PromptHandedOutTwice()
            | HandOutGap()
            | DatasetChanged()
        ):
            return _why_hand_out(error)
        case CursorJump() | WrongTargetStep() | WrongWeightVersion() | ShortfallRefused():
            return _why_batch(error)
        case StepMismatch() | StepAlreadyOpen() | OptimizerCommitWindow() | GroupClaimed():
            return _why_step(error)
        case RowsNotClearable():
            return f"rows {_list(error.keys)} are owned or unknown, they may not be cleared"
        case TaskIndexBackwards():
            return f"task index {error.next_index} is before {error.at_least}"
        case NotCanonical():
            return f"group {error.group_id} has no other place, forgetting it would lose its prompt"
        case _:
            assert_never(error)


def _why_attempt(error: UnknownAttempt | WrongAttemptStatus | SealedDifferently) -> str:
    name = f"group {error.group_id}, sibling {error.sibling_index}, attempt {error.attempt_index}"
    match error:
        case UnknownAttempt():
            return f"{name}: the only attempt that may be named here is {error.needed}"
        case WrongAttemptStatus():
            return f"{name} is {error.status}, the event needs {_or(error.needed)}"
        case SealedDifferently():
            return f"{name} was sealed before with another {_list(error.fields)}"
        case _:
            assert_never(error)


def _why_hand_out(
    error: WrongCount
    | RepeatedIds
    | IllegalPromptId
    | PromptHandedOutTwice
    | HandOutGap
    | DatasetChanged,
) -> str:
    match error:
        case WrongCount():
            return f"{error.what}: {error.count}, needed {error.needed}"
        case RepeatedIds():
            return f"named more than once: {_list(error.ids)}"
        case IllegalPromptId():
            return f"prompt id {error.prompt_id!r} is empty or has a slash"
        case PromptHandedOutTwice():
            return f"prompt {error.prompt_id} was handed out before"
        case HandOutGap():
            return (
                f"the dataloader handed out position {error.position} of epoch {error.epoch}, "
                f"expected position {error.expected_position} of epoch {error.expected_epoch}"
            )
        case DatasetChanged():
            return f"the dataloader's {error.what} is {error.found}, expected {error.expected}"
        case _:
            assert_never(error)


def _why_batch(
    error: CursorJump | WrongTargetStep | WrongWeightVersion | ShortfallRefused,
) -> str:
    match error:
        case CursorJump():
            return f"dispatch batch {error.dispatch_index} is not the next one, {error.needed}"
        case WrongTargetStep():
            subject = "the batch" if error.group_id is None else f"group {error.group_id}"
            return f"target step {error.target_step} of {subject}, needed {error.needed}"
        case WrongWeightVersion():
            limit = "" if error.at_most is None else f" and at most {error.at_most}"
            return (
                f"{error.what} weight version {error.weight_version}, "
                f"must be at least {error.at_least}{limit}"
            )
        case ShortfallRefused():
            return (
                f"the place of group {error.group_id} may not be missing from target step "
                f"{error.shortfall_step}; legal steps: {error.first} to {error.last}"
            )
        case _:
            assert_never(error)


def _why_step(
    error: StepMismatch | StepAlreadyOpen | OptimizerCommitWindow | GroupClaimed,
) -> str:
    match error:
        case StepMismatch():
            needed = "no step is open" if error.needed is None else f"it is step {error.needed}"
            return f"the event is about training step {error.step}, but {needed}"
        case StepAlreadyOpen():
            return f"training step {error.step} is open and holds claims"
        case OptimizerCommitWindow():
            window = "open" if error.window_is_open else "not open"
            return f"the optimizer-commit window of training step {error.step} is {window}"
        case GroupClaimed():
            return f"group {error.group_id} is claimed by training step {error.step}"
        case _:
            assert_never(error)


def _or(values: tuple[PromptGroupStatus, ...] | tuple[RolloutAttemptStatus, ...]) -> str:
    return " or ".join(values)


def _list(values: tuple[str, ...]) -> str:
    shown = ", ".join(values[:5])
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"
