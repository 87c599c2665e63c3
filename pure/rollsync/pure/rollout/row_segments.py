"""Which rows a save writes again, and which it shares with the saves before it.

Row payloads lie in segments: files that are written once, named by their content, and shared by
snapshots. Rules kept here:

1. A row is written again only if it is new or has changed, or if its segment is mostly dead.
2. A snapshot's segments are listed oldest first, and of a row that is in several, the last counts.
3. A segment of which less than half is needed is not kept for the rest: so a snapshot's segments
   hold at most twice what it needs, and old segments do not live for ever for one row.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class SavedRow(Struct, frozen=True, kw_only=True):
    """Where a row was saved last."""

    segment: str
    revision: int
    """The row's revision in the data plane then."""
    fields: tuple[str, ...] = ()
    """Names of its tensors, sorted."""
    tags: tuple[tuple[str, str], ...] = ()
    """Its tags as text, sorted by name."""


class RowSegments(Struct, frozen=True, kw_only=True):
    """What the saves so far have written."""

    rows: Mapping[str, SavedRow]
    """By row key."""
    row_counts: Mapping[str, int]
    """Rows in each segment, in the order in which the segments were written."""


class RowSavePlan(Struct, frozen=True, kw_only=True):
    """What the next save does about rows."""

    keep: tuple[str, ...]
    """Segments to list again, oldest first."""
    write: tuple[str, ...]
    """Keys of the rows to write into new segments, sorted."""


def plan_row_save(needed: Mapping[str, int], saved: RowSegments) -> RowSavePlan:
    """Plan a save.

    Args:
        needed: key and current revision of every row that the snapshot must hold.
        saved: what earlier saves have written.
    """
    useful: dict[str, list[str]] = {}
    write: list[str] = []
    for key, revision in needed.items():
        row = saved.rows.get(key)
        if row is None or row.revision != revision or row.segment not in saved.row_counts:
            write.append(key)
        else:
            useful.setdefault(row.segment, []).append(key)
    keep: list[str] = []
    for segment, count in saved.row_counts.items():
        keys = useful.get(segment, [])
        if keys and 2 * len(keys) >= count:
            keep.append(segment)
        else:
            write.extend(keys)
    return RowSavePlan(keep=tuple(keep), write=tuple(sorted(write)))
