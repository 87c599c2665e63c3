"""Which rows a save writes again, and which it shares with the saves before it.

Row payloads lie in segments: files that are written once, named by their content, and shared by
snapshots. Rules kept here:

1. A row is written again only if it is new or has changed, or if its segment is mostly dead.
2. A snapshot's segments are listed oldest first, and of a row that is in several, the last counts.
3. A segment of which less than half is needed is not kept for the rest: so a snapshot's segments
   hold at most twice what it needs, and old segments do not live for ever for one row.
4. Planning costs in proportion to what changed since the last save, not to what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace
from rpds import HashTrieMap


class SavedRow(Struct, frozen=True, kw_only=True):
    """Where a row was saved last."""

    segment: str
    revision: int
    """The row's revision in the data plane then."""
    fields: tuple[str, ...] = ()
    """Names of its tensors, sorted."""
    tags: tuple[tuple[str, str], ...] = ()
    """Its tags as text, sorted by name."""


class SavedSegment(Struct, frozen=True, kw_only=True):
    """A segment that the last save listed."""

    name: str
    keys: tuple[str, ...]
    """Of every row that it holds."""
    live: int
    """How many of them the last save needs, and needs from here."""


class RowSegments(Struct, frozen=True, kw_only=True):
    """What the last save listed."""

    rows: HashTrieMap[str, SavedRow]
    """By row key: exactly the rows that it needs."""
    segments: tuple[SavedSegment, ...]
    """Oldest first."""


class RowSavePlan(Struct, frozen=True, kw_only=True):
    """What the next save does about rows."""

    keep: tuple[SavedSegment, ...]
    """Segments to list again, oldest first."""
    write: dict[str, int]
    """Key and revision of the rows to write into new segments, by key."""
    gone: tuple[str, ...]
    """Rows that the last save needed, and this one does not."""


def nothing_saved() -> RowSegments:
    """Before the first save."""
    return RowSegments(rows=HashTrieMap(), segments=())


def found_segments(keys: Mapping[str, Iterable[str]], rows: Mapping[str, SavedRow]) -> RowSegments:
    """What a save listed that a resume has read.

    Args:
        keys: of every row in each of its segments, oldest first.
        rows: by key, the rows that are needed from them.
    """
    live = Counter(row.segment for row in rows.values())
    return RowSegments(
        rows=HashTrieMap(rows),
        segments=tuple(
            SavedSegment(name=name, keys=tuple(held), live=live[name])
            for name, held in keys.items()
        ),
    )


def plan_row_save(
    needed: Mapping[str, int], saved: RowSegments, *, gone: Iterable[str]
) -> RowSavePlan:
    """Plan a save. Costs in proportion to what changed.

    Args:
        needed: key and current revision of every row that is new, or may have changed, since the
            last save. Rows that are neither here nor in `gone` are needed as they were.
        saved: what the last save listed.
        gone: rows that this save does not need, and the last one may have needed.
    """
    lost = {key for key in gone if key in saved.rows and key not in needed}
    write: dict[str, int] = {}
    changed: set[str] = set()
    for key, revision in needed.items():
        row = saved.rows.get(key)
        if row is None:
            write[key] = revision
        elif row.revision != revision:
            write[key] = revision
            changed.add(key)
    dead = Counter(saved.rows[key].segment for key in (*lost, *changed))
    keep: list[SavedSegment] = []
    for segment in saved.segments:
        live = segment.live - dead[segment.name]
        if live and 2 * live >= len(segment.keys):
            keep.append(replace(segment, live=live))
            continue
        for key in segment.keys if live else ():
            row = saved.rows.get(key)
            if row is not None and row.segment == segment.name and key not in lost:
                write.setdefault(key, row.revision)
    return RowSavePlan(
        keep=tuple(keep), write=dict(sorted(write.items())), gone=tuple(sorted(lost))
    )


def after_save(
    plan: RowSavePlan, saved: RowSegments, written: Mapping[str, Mapping[str, SavedRow]]
) -> RowSegments:
    """What the planned save has listed.

    Args:
        saved: what the plan was made from.
        written: the rows of each new segment, by name, oldest first.
    """
    rows = saved.rows
    for key in plan.gone:
        rows = rows.discard(key)
    for held in written.values():
        rows = rows.update(held)
    return RowSegments(
        rows=rows,
        segments=(
            # No new one is equal to one that is kept: all rows of the latter would be written.
            *plan.keep,
            *(
                SavedSegment(name=name, keys=tuple(held), live=len(held))
                for name, held in written.items()
            ),
        ),
    )
