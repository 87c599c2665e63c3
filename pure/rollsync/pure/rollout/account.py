"""Where every handed-out prompt is: the account that the promise is about.

Places are derived from the state's maps, never stored. `place_of` asks about one prompt,
`account` about all of them.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from rollsync.pure.rollout.persistent import items_of, values_of
from rollsync.pure.rollout.state import (
    Dropped,
    DropReason,
    PromptGroupPhase,
    PromptPlace,
    RolloutState,
    Trained,
)


class Account(Struct, frozen=True, kw_only=True):
    """Counts of prompts by place. `handed_out` is their sum when every prompt has one place."""

    handed_out: int
    """Prompts that are anywhere."""
    by_place: tuple[tuple[PromptPlace, int], ...]
    """In the order of `PromptPlace`, all places."""
    dropped_by_reason: tuple[tuple[DropReason, int], ...]
    in_two_places: tuple[str, ...]
    """Prompt ids that have more than one place: none in a legal state."""


def places(state: RolloutState) -> tuple[tuple[str, PromptPlace], ...]:
    """Every prompt id with its place; a prompt with two places appears twice. O(n)."""
    claimed = frozenset(() if state.open_step is None else state.open_step.group_ids)
    found: list[tuple[str, PromptPlace]] = []
    for record in values_of(state.ledger.groups):
        reserved = record.phase is PromptGroupPhase.RESERVED
        place = PromptPlace.RESERVED if reserved else PromptPlace.ADMITTED
        found.append((record.prompt.prompt_id, place))
    for group in values_of(state.replay):
        place = PromptPlace.CLAIMED if group.group_id in claimed else PromptPlace.READY
        found.append((group.prompt.prompt_id, place))
    found.extend(
        (prompt.prompt_id, PromptPlace.RESERVE) for prompt in state.runtime.replacement_reserve
    )
    for prompt_id, outcome in items_of(state.outcomes):
        trained = isinstance(outcome, Trained)
        found.append((prompt_id, PromptPlace.TRAINED if trained else PromptPlace.DROPPED))
    return tuple(found)


def place_of(state: RolloutState, prompt_id: str) -> PromptPlace | None:
    """The prompt's place; None if it was not handed out. O(log n), and O(n) in the reserve."""
    record = state.ledger.groups.get(prompt_id)
    if record is not None:
        reserved = record.phase is PromptGroupPhase.RESERVED
        return PromptPlace.RESERVED if reserved else PromptPlace.ADMITTED
    if prompt_id in state.replay:
        claimed = state.open_step is not None and prompt_id in state.open_step.group_ids
        return PromptPlace.CLAIMED if claimed else PromptPlace.READY
    outcome = state.outcomes.get(prompt_id)
    if outcome is not None:
        return PromptPlace.TRAINED if isinstance(outcome, Trained) else PromptPlace.DROPPED
    if any(prompt.prompt_id == prompt_id for prompt in state.runtime.replacement_reserve):
        return PromptPlace.RESERVE
    return None


def account(state: RolloutState) -> Account:
    """Prompts by place. O(n)."""
    found = places(state)
    by_id = Counter(prompt_id for prompt_id, _ in found)
    by_place = Counter(place for _, place in found)
    reasons = Counter(
        outcome.reason for outcome in values_of(state.outcomes) if isinstance(outcome, Dropped)
    )
    return Account(
        handed_out=len(by_id),
        by_place=tuple((place, by_place[place]) for place in PromptPlace),
        dropped_by_reason=tuple((reason, reasons[reason]) for reason in DropReason),
        in_two_places=tuple(sorted(name for name, count in by_id.items() if count > 1)),
    )
