"""Row segments: exact bytes back, small overhead, and damage noticed or at least harmless."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsync.shell.rollout.data_plane import StoredRow
from rollsync.shell.rollout.segments import SegmentError, decode_segment, encode_segment, row_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, StoredRow]:
    made = {}
    for key in draw(st.lists(st.text(min_size=1, max_size=6), max_size=5, unique=True)):
        fields = {}
        for name in draw(st.lists(st.sampled_from("abcd"), max_size=3, unique=True)):
            shape = draw(st.lists(st.integers(0, 3), max_size=3))
            values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1))
            fields[name] = values.to(draw(st.sampled_from(DTYPES)))
        tags = draw(st.dictionaries(st.text(max_size=3), st.integers() | st.text(), max_size=2))
        tags = {name: tag for name, tag in tags.items() if isinstance(tag, str) or abs(tag) < 2**60}
        made[key] = StoredRow(fields, tags)
    return made


@settings(max_examples=150, deadline=None)
@given(rows())
def test_rows_come_back_exactly_and_equal_rows_have_equal_bytes(
    stored: dict[str, StoredRow],
) -> None:
    data = encode_segment(stored)
    back = decode_segment(data, "segment")
    assert list(back) == list(stored)
    for key, row in stored.items():
        assert dict(back[key].tags) == dict(row.tags)
        assert set(back[key].fields) == set(row.fields)
        for name, tensor in row.fields.items():
            got = back[key].fields[name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got, tensor)
    assert encode_segment(back) == data


def many(count: int) -> dict[str, StoredRow]:
    return {
        f"e0p{i}/0": StoredRow(
            {
                "tokens": torch.full((500,), i),
                "logprobs": torch.full((450,), float(i)),
                "mask": torch.ones(500, dtype=torch.bool),
            }
        )
        for i in range(count)
    }


def test_the_bytes_beside_the_tensors_are_few() -> None:
    stored = many(1280)
    tensors = sum(row_bytes(row) for row in stored.values())
    assert len(encode_segment(stored)) <= 1.02 * tensors


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_segment_is_refused(cut: int) -> None:
    data = encode_segment(many(2))
    with pytest.raises(SegmentError, match=r"segments/x: "):
        decode_segment(data[:cut], "segments/x")


def test_every_flipped_bit_of_the_header_is_refused_or_read_without_another_error() -> None:
    """The store's digest notices each flip; here it must only never do harm."""
    data = encode_segment(many(2))
    header = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for position in range(header * 8):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        try:
            decode_segment(bytes(damaged), "x")
        except SegmentError:
            refused += 1
    assert refused > header * 4


@pytest.mark.parametrize("start", [b'{"__metadata__":', b'{"0":'])
def test_a_deep_header_is_refused(start: bytes) -> None:
    header = start + b"[" * 100_000 + b"}"
    with pytest.raises(SegmentError):
        decode_segment(len(header).to_bytes(8, "little") + header, "deep")
