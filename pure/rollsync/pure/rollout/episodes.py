"""How an environment's episodes and the recovery ledger have to agree.

A backend that keeps state between turns knows each running attempt as an episode. Rule kept here:
the two sides may be at different points of the same attempt (a result on its way from one to the
other), but an episode of an attempt that the ledger never dispatched means that identities are
mixed up, and nothing may be saved from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from rollsync.pure.rollout.state import RolloutAttemptRecord, RolloutAttemptStatus, RolloutState


class EnvironmentEpisode(Struct, frozen=True, kw_only=True):
    """One attempt of one sibling, as the environment's backend names it."""

    group_id: str
    sibling_index: int
    attempt_index: int


class EpisodeContradiction(Struct, frozen=True, kw_only=True):
    """An episode that cannot be one of this run's attempts."""

    episode: EnvironmentEpisode
    why: str


def contradictions(
    state: RolloutState, episodes: Iterable[EnvironmentEpisode]
) -> tuple[EpisodeContradiction, ...]:
    """Episodes of unfinished groups whose attempt the ledger does not know as dispatched.

    Episodes of groups that are no longer unfinished are none: the backend has only not been told
    yet that they ended.
    """
    found = []
    for episode in episodes:
        if episode.group_id not in state.ledger.groups:
            continue
        attempt = _attempt(state, episode)
        if attempt is None:
            found.append(
                EpisodeContradiction(episode=episode, why="the ledger has no such attempt")
            )
        elif attempt.status is RolloutAttemptStatus.RESERVED:
            found.append(
                EpisodeContradiction(episode=episode, why="the attempt was never dispatched")
            )
    return tuple(found)


def running(
    state: RolloutState, episodes: Iterable[EnvironmentEpisode]
) -> tuple[EnvironmentEpisode, ...]:
    """The episodes whose attempt was running: those that a resume can continue."""
    return tuple(
        episode
        for episode in episodes
        if (attempt := _attempt(state, episode)) is not None
        and attempt.status is RolloutAttemptStatus.DISPATCHED
    )


def _attempt(state: RolloutState, episode: EnvironmentEpisode) -> RolloutAttemptRecord | None:
    record = state.ledger.groups.get(episode.group_id)
    if record is None or not 0 <= episode.sibling_index < len(record.siblings):
        return None
    attempts = record.siblings[episode.sibling_index].attempts
    if not 0 <= episode.attempt_index < len(attempts):
        return None
    return attempts[episode.attempt_index]
