"""The state of an engine from the states of its ranks.

Rule kept here: an engine generates with all its ranks at once, so it serves a version only when
each of them serves that version; ranks that hold different weights make it poisoned, although none
of them is.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollsync.pure.refit.lifecycle import (
    Closed,
    Connected,
    EngineState,
    Poisoned,
    Serving,
    Unconnected,
    Updating,
)


def engine_state(ranks: Sequence[EngineState]) -> EngineState:
    """What the ranks of one engine are together; of no ranks, unconnected."""
    if any(isinstance(rank, Closed) for rank in ranks):
        return Closed()
    connected = all(_is_connected(rank) for rank in ranks)
    versions = {_version(rank) for rank in ranks}
    if versions <= {None}:
        return Connected() if ranks and connected else Unconnected()
    causes = [rank.cause for rank in ranks if isinstance(rank, Poisoned)]
    version = max(version for version in versions if version is not None)
    if causes:
        return Poisoned(version, causes[0], connected=connected)
    kinds = {type(rank) for rank in ranks}
    if len(versions) > 1 or len(kinds) > 1:
        held = ", ".join("none" if rank is None else str(rank) for rank in map(_version, ranks))
        cause = f"its ranks hold the weight versions {held}"
        return Poisoned(version, cause, connected=connected)
    return Updating(version) if kinds == {Updating} else Serving(version, connected=connected)


def _version(rank: EngineState) -> int | None:
    if isinstance(rank, Updating | Serving | Poisoned):
        return rank.version
    return None


def _is_connected(rank: EngineState) -> bool:
    if isinstance(rank, Serving | Poisoned):
        return rank.connected
    return isinstance(rank, Connected | Updating)
