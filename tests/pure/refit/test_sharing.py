"""Receivers of different layouts share a sender's buffers, in every small world."""

import itertools

import pytest
from returns.pipeline import is_successful

from rollsync.pure.refit import ALIGNMENT_BYTES, check_bucket_bytes, describe
from rollsync.pure.refit.errors import TooManyLayouts
from rollsync.pure.refit.sharing import SharedStream, share_buffers

BUFFERS = 3


@pytest.mark.parametrize("receivers", range(6))
@pytest.mark.parametrize("blocks", range(1, 6))
def test_regions_are_disjoint_and_every_receiver_is_in_one(receivers: int, blocks: int) -> None:
    buffer_bytes = blocks * ALIGNMENT_BYTES
    for layouts in itertools.product((None, "a", "b", "c"), repeat=receivers):
        shared = share_buffers(layouts, buffer_bytes, BUFFERS)
        if len(set(layouts)) > blocks:
            assert shared.failure() == TooManyLayouts(
                layouts=len(set(layouts)), buffer_bytes=buffer_bytes
            )
            continue
        streams = shared.unwrap()
        assert len(streams) == len(set(layouts))
        end = 0
        for stream in streams:
            assert stream.first_byte == end
            assert check_bucket_bytes(stream.bucket_bytes) is None
            assert {layouts[index] for index in stream.receivers} == {stream.layout}
            end += BUFFERS * stream.bucket_bytes
        assert end <= BUFFERS * buffer_bytes
        assert len({stream.bucket_bytes for stream in streams}) <= 1
        assert sorted(i for stream in streams for i in stream.receivers) == list(range(receivers))


def test_one_layout_has_the_buffers_for_itself() -> None:
    assert share_buffers(["a", "a"], 1024, 2).unwrap() == (SharedStream("a", (0, 1), 0, 1024),)


def test_too_many_layouts_are_refused_in_words() -> None:
    refused = share_buffers(["a", "b"], ALIGNMENT_BYTES, 2)
    assert not is_successful(refused)
    assert "feeds 2 different layouts" in describe(refused.failure())
