"""What a row segment says of itself: which rows it has, with which tags and tensors.

`rollsync.shell.rollout.segments` makes rows of it and of the tensors' bytes. Rule kept here: needs
no torch, so that the commands that only show a segment can do without; bytes are checked before
anything is believed.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

METADATA_KEY = "rollsync.rows"
"""Of the safetensors metadata; its value is the JSON text of a `SegmentIndex`."""
_Tag = str | int | float | bool


class SegmentColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One field of some rows, with one dtype."""

    field: str
    rows: tuple[int, ...]
    """Indices into the segment's keys, ascending."""
    shapes: tuple[tuple[int, ...], ...]


class SegmentIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the flat tensors mean. Tensor `i` of the file belongs to column `i`."""

    keys: tuple[str, ...]
    tags: tuple[dict[str, _Tag], ...]
    columns: tuple[SegmentColumn, ...]


class _Tensor(msgspec.Struct, frozen=True):
    """An entry of the safetensors header; where its bytes lie is of no matter here."""

    dtype: str


class ListedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row, for people."""

    tags: dict[str, _Tag]
    tensors: dict[str, str]
    """Dtype and shape, by field."""


class NoSegment(ValueError):
    """Bytes that are no row segment."""


def read_index(data: bytes) -> SegmentIndex:
    """The index of a segment.

    Raises:
        NoSegment: the bytes are no segment, or the index is damaged.
    """
    return _index_of(_header(data))


def list_rows(data: bytes) -> Mapping[str, ListedRow]:
    """Every row of a segment, by key.

    Raises:
        NoSegment: the bytes are no segment, or the index is damaged.
    """
    header = _header(data)
    index = _index_of(header)
    try:
        rows = {
            key: ListedRow(tags=tags, tensors={})
            for key, tags in zip(index.keys, index.tags, strict=True)
        }
        listed = list(rows.values())
        for number, column in enumerate(index.columns):
            dtype = msgspec.json.decode(header[str(number)], type=_Tensor).dtype
            for row, shape in zip(column.rows, column.shapes, strict=True):
                listed[row].tensors[column.field] = f"{dtype} {list(shape)}"
    except (msgspec.MsgspecError, ValueError, LookupError) as error:
        raise NoSegment(str(error)) from error
    return rows


def _header(data: bytes) -> dict[str, msgspec.Raw]:
    """The safetensors header: its length in 8 bytes, then JSON."""
    if len(data) < 8:
        raise NoSegment("shorter than a header")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise NoSegment("the header is longer than the file")
    try:
        return msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NoSegment(str(error)) from error


def _index_of(header: Mapping[str, msgspec.Raw]) -> SegmentIndex:
    try:
        metadata = msgspec.json.decode(header["__metadata__"], type=dict[str, str])
        return msgspec.json.decode(metadata[METADATA_KEY], type=SegmentIndex)
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError) as error:
        raise NoSegment(str(error)) from error
