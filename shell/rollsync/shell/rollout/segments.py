"""Rows as safetensors bytes, and back.

A segment is columnar: all values of one field and dtype are one flat tensor, and the file's
metadata has each row's key, tags and shapes. So a small row costs tens of bytes beside its tensors.
Rules kept here: equal rows in equal order give equal bytes; bytes from a file are checked in full
(a segment that does not add up is a `SegmentError`), and reading them never executes anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from rollsync.pure.rollout.row_segments import SavedRow
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.archive import FoundBundle
from rollsync.shell.rollout.data_plane import Row, StoredRow
from rollsync.shell.segment_index import METADATA_KEY, SegmentColumn, SegmentIndex, read_index


class SegmentError(RollsyncError):
    """Bytes that are no segment, or one that contradicts itself."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message, remedy="remove the saves that list it, and resume from one that does not"
        )


def encode_segment(rows: Mapping[str, StoredRow]) -> bytes:
    """The segment of these rows, in this order."""
    tensors: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for index, row in enumerate(rows.values()):
        for field in sorted(row.fields):
            tensor = row.fields[field]
            tensors.setdefault((field, str(tensor.dtype)), []).append((index, tensor))
    columns = []
    flat = {}
    for number, (field, dtype) in enumerate(sorted(tensors)):
        parts = tensors[field, dtype]
        columns.append(
            SegmentColumn(
                field=field,
                rows=tuple(index for index, _ in parts),
                shapes=tuple(tuple(tensor.shape) for _, tensor in parts),
            )
        )
        flat[str(number)] = torch.cat([tensor.reshape(-1) for _, tensor in parts])
    index_bytes = msgspec.json.encode(
        SegmentIndex(
            keys=tuple(rows),
            tags=tuple(dict(row.tags) for row in rows.values()),
            columns=tuple(columns),
        ),
        order="deterministic",
    )
    return save(flat, metadata={METADATA_KEY: index_bytes.decode()})


def decode_segment(data: bytes, name: str) -> dict[str, StoredRow]:
    """The rows of a segment, in the order in which they were written; revisions are 0.

    Args:
        name: what the bytes are, for errors.

    Raises:
        SegmentError: the bytes are damaged, or are no segment.
    """
    try:
        index = read_index(data)
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise SegmentError(f"{name}: not a row segment: {error}") from error
    if len(index.tags) != len(index.keys) or len(set(index.keys)) != len(index.keys):
        raise SegmentError(f"{name}: {len(index.keys)} keys with {len(index.tags)} tags, or twice")
    if set(tensors) != {str(number) for number in range(len(index.columns))}:
        raise SegmentError(f"{name}: {len(tensors)} tensors for {len(index.columns)} columns")
    fields: list[dict[str, torch.Tensor]] = [{} for _ in index.keys]
    for number, column in enumerate(index.columns):
        _spread(tensors[str(number)], column, fields, name)
    return {
        key: StoredRow(row, tags)
        for key, row, tags in zip(index.keys, fields, index.tags, strict=True)
    }


def read_rows(bundle: FoundBundle, name: str) -> dict[str, StoredRow]:
    """The rows of one of a bundle's segments, as `decode_segment` has them.

    Raises:
        RollsyncError: the segment is not there, is damaged, or is none of rows.
    """
    return decode_segment(bundle.read_segment(name), f"{bundle.path}, segment {name}")


def row_bytes(row: StoredRow) -> int:
    """Bytes of the row's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in row.fields.values())


def saved_row(row: StoredRow, *, segment: str, revision: int) -> SavedRow:
    """What to remember of a row that `segment` has."""
    return SavedRow(
        segment=segment,
        revision=revision,
        fields=tuple(sorted(row.fields)),
        tags=tuple(sorted((name, str(value)) for name, value in row.tags.items())),
    )


def rows_of(stored: Mapping[str, StoredRow]) -> dict[str, Row]:
    """Just the tensors, as `DataPlane.put` takes them."""
    return {key: row.fields for key, row in stored.items()}


def _spread(
    flat: torch.Tensor, column: SegmentColumn, fields: Sequence[dict[str, torch.Tensor]], name: str
) -> None:
    """Cut a column's tensor into its rows' tensors."""
    counts = [math.prod(shape) for shape in column.shapes]
    legal = (
        len(column.rows) == len(column.shapes)
        and all(size >= 0 for shape in column.shapes for size in shape)
        and flat.dim() == 1
        and sum(counts) == flat.numel()
        and all(0 <= row < len(fields) for row in column.rows)
    )
    if not legal:
        raise SegmentError(f"{name}: the shapes of field {column.field} do not add up")
    for row, shape, part in zip(column.rows, column.shapes, flat.split(counts), strict=True):
        if column.field in fields[row]:
            raise SegmentError(f"{name}: field {column.field} is in a row twice")
        fields[row][column.field] = part.view(shape)
