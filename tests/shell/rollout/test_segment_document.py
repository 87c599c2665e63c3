"""`docs/format.md` is enough to read row segments, without torch, safetensors or rollsync."""

from __future__ import annotations

import json
import math
import struct
from typing import NamedTuple

import torch

from rollsync.shell.rollout.data_plane import StoredRow
from rollsync.shell.rollout.segments import decode_segment, encode_segment


class Part(NamedTuple):
    """One tensor of a row."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


BYTES = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}

ROWS = {
    "group-a/0": StoredRow(
        {
            "tokens": torch.tensor([1, 2, 3]),
            "logprobs": torch.tensor([[0.5, -1.0]]),
            "mask": torch.tensor([True, False, True]),
        },
        {"weight_version": 3, "task": "décompte", "reward": 0.5, "truncated": False},
    ),
    "group-a/1": StoredRow({"tokens": torch.tensor([4]), "logprobs": torch.zeros(0, 2)}),
    "group-b/0": StoredRow({"logprobs": torch.tensor(2.0, dtype=torch.bfloat16)}),
}


def read_segment(data: bytes) -> dict[str, tuple[object, dict[str, Part]]]:
    """Tags and tensors by key, after section 6 of the document."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    index = json.loads(header["__metadata__"]["rollsync.rows"])
    rows: list[tuple[object, dict[str, Part]]] = [(tags, {}) for tags in index["tags"]]
    for number, column in enumerate(index["columns"]):
        tensor = header[str(number)]
        start, end = tensor["data_offsets"]
        for row, shape in zip(column["rows"], column["shapes"], strict=True):
            size = math.prod(shape) * BYTES[tensor["dtype"]]
            rows[row][1][column["field"]] = Part(
                tensor["dtype"], tuple(shape), body[start : start + size]
            )
            start += size
        assert start == end
    return dict(zip(index["keys"], rows, strict=True))


def expected(row: StoredRow) -> tuple[object, dict[str, Part]]:
    return dict(row.tags), {
        name: Part(
            NAMES[tensor.dtype],
            tuple(tensor.shape),
            bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()),
        )
        for name, tensor in row.fields.items()
    }


def test_segment_is_read_by_the_document_alone() -> None:
    read = read_segment(encode_segment(ROWS))
    assert list(read) == list(ROWS)
    assert read == {key: expected(row) for key, row in ROWS.items()}


def test_rollsync_reads_the_same() -> None:
    data = encode_segment(ROWS)
    decoded = decode_segment(data, "segment")
    assert {key: expected(row) for key, row in decoded.items()} == read_segment(data)
