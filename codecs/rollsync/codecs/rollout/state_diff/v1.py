"""Version 1 of the difference of two rollout states. Nil means that a field did not change."""

from __future__ import annotations

from rollsync.codecs.canonical import Finite, Natural, Wire
from rollsync.codecs.rollout.recovery_ledger import v1 as ledger
from rollsync.codecs.rollout.state import v1 as state


class NewProgress(Wire, frozen=True, kw_only=True):
    """The trainer's counters changed."""

    value: state.Progress


class NewDataloader(Wire, frozen=True, kw_only=True):
    """The dataloader's place changed."""

    value: state.Dataloader


class NewDispatchIndex(Wire, frozen=True, kw_only=True):
    """The sampler's cursor changed."""

    value: state.DispatchIndex


class NewIndex(Wire, frozen=True, kw_only=True):
    """An index that counts from 0 changed."""

    value: Natural


class NewOpenStep(Wire, frozen=True, kw_only=True):
    """The open training step changed; nil when none is open any more."""

    value: state.OpenStep | None


class NewFlag(Wire, frozen=True, kw_only=True):
    """A flag changed."""

    value: bool


class ReserveDiff(Wire, frozen=True, kw_only=True):
    """How many prompts left at the front of the queue, and which came to its end."""

    taken: Natural
    appended: tuple[ledger.Prompt, ...]


class ShortfallDiff(Wire, frozen=True, kw_only=True):
    """Target steps and groups that they lack."""

    put: tuple[tuple[Natural, Natural], ...]
    removed: tuple[Natural, ...]


class MetricsDiff(Wire, frozen=True, kw_only=True):
    """Group ids and metrics, these sorted by name."""

    put: tuple[tuple[str, tuple[tuple[str, Finite], ...]], ...]
    removed: tuple[str, ...]


class RewardsDiff(Wire, frozen=True, kw_only=True):
    """Group ids and rewards."""

    put: tuple[tuple[str, tuple[state.Reward, ...]], ...]
    removed: tuple[str, ...]


class LedgerDiff(Wire, frozen=True, kw_only=True):
    """Unfinished groups."""

    put: tuple[tuple[str, ledger.Group], ...]
    removed: tuple[str, ...]


class ReplayDiff(Wire, frozen=True, kw_only=True):
    """Ready groups."""

    put: tuple[tuple[str, state.ReadyGroup], ...]
    removed: tuple[str, ...]


class OutcomesDiff(Wire, frozen=True, kw_only=True):
    """Prompt ids and what became of the prompts."""

    put: tuple[tuple[str, state.Trained | state.Dropped], ...]
    removed: tuple[str, ...]


class SetDiff(Wire, frozen=True, kw_only=True):
    """Members of a set."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


class RolloutStateDiff(Wire, frozen=True, kw_only=True):
    """What differs between two states. In each part, what is put or added, and what is removed, is
    sorted by its key."""

    progress: NewProgress | None
    dataloader_state: NewDataloader | None
    sampler_dispatch_index: NewDispatchIndex | None
    next_nemo_gym_task_index: NewIndex | None
    next_commit_index: NewIndex | None
    open_step: NewOpenStep | None
    sampler_stamps_target_steps: NewFlag | None
    replacement_reserve: ReserveDiff
    batch_shortfall: ShortfallDiff
    finalizer_metrics: MetricsDiff
    finalizer_rewards: RewardsDiff
    ledger: LedgerDiff
    replay: ReplayDiff
    outcomes: OutcomesDiff
    rows_to_clear: SetDiff
