"""Values as plain JSON data, for people: what the commands `inspect` and `diff` print.

Rule kept here: maps become objects in key order and sets become sorted arrays, so that the same
value always looks the same. Nothing reads a view back; the bytes are what counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct
from rpds import HashTrieMap, HashTrieSet, Queue

Path = tuple[str | int, ...]
"""Names of fields, keys of maps, and indices of arrays, from the outside in."""


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One place where two views differ. A side that has nothing there lacks the field."""

    path: Path
    before: object = msgspec.UNSET
    after: object = msgspec.UNSET


def view(value: object) -> object:
    """`value` as JSON data: objects, arrays, strings, numbers, booleans and None.

    Bytes become base64, enumerations their values, and the keys of maps strings.
    """
    data: object = msgspec.json.decode(msgspec.json.encode(value, enc_hook=_persistent))
    return data


def _persistent(value: object) -> object:
    if isinstance(value, HashTrieMap):
        return dict(sorted(value.items()))
    if isinstance(value, HashTrieSet):
        return sorted(value)
    if isinstance(value, Queue):
        return list(value)
    raise TypeError(f"no view of {type(value).__name__}")


def changes(before: object, after: object, path: Path = ()) -> Iterator[Change]:
    """Where two views differ, in the order of the first; what only the second has comes last."""
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _changes_inside(before, after, path)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _changes_inside(dict(enumerate(before)), dict(enumerate(after)), path)
    elif before != after or type(before) is not type(after):
        yield Change(path=path, before=before, after=after)


def _changes_inside(
    before: dict[str | int, object], after: dict[str | int, object], path: Path
) -> Iterator[Change]:
    for key, item in before.items():
        if key in after:
            yield from changes(item, after[key], (*path, key))
        else:
            yield Change(path=(*path, key), before=item)
    for key, item in after.items():
        if key not in before:
            yield Change(path=(*path, key), after=item)
