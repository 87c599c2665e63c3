"""Version 1 of the recovery ledger: every unfinished prompt group, sorted by group id."""

from __future__ import annotations

from typing import Literal

from rollsync.codecs.canonical import Finite, Natural, Wire


class Prompt(Wire, frozen=True, kw_only=True):
    """A durable locator for one hand-out of one prompt."""

    prompt_id: str
    sample_id: str
    task: str
    epoch: Natural
    position: Natural
    content_digest: str


class Attempt(Wire, frozen=True, kw_only=True):
    """One physical generation of one sibling."""

    index: Natural
    status: Literal["reserved", "dispatched", "sealed", "failed", "abandoned"]
    receipt: str | None
    reward: Finite | None
    masked: bool | None
    staged_keys: tuple[str, ...]


class Sibling(Wire, frozen=True, kw_only=True):
    """One of a group's generations."""

    index: Natural
    attempts: tuple[Attempt, ...]


class Group(Wire, frozen=True, kw_only=True):
    """An unfinished prompt group."""

    group_id: str
    admission_id: str | None
    prompt: Prompt
    granularity: Literal["sibling", "prompt_group"]
    expected_generations: Natural
    target_step: Natural | None
    start_weight_version: Natural | None
    phase: Literal["reserved", "admitted"]
    status: Literal["generating", "ready_to_finalize", "finalizing", "finalization_unknown"]
    siblings: tuple[Sibling, ...]
    recovery_count: Natural


class RecoveryLedger(Wire, frozen=True, kw_only=True):
    """The whole ledger."""

    groups: tuple[Group, ...]
