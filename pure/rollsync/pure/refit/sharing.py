"""How the receivers of one sender share its buffers when they keep different parts of the weights.

Receivers of one layout read the same buckets, packed once. Receivers of different layouts are sent
different streams, each through a share of its own of the buffers, so that a sender's memory does
not grow with the number of layouts that it feeds: with more of them, buckets are smaller.

Rule kept here: shares are aligned, equally large, and do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.pure.refit.buckets import ALIGNMENT_BYTES
from rollsync.pure.refit.errors import TooManyLayouts


class SharedStream(Struct, frozen=True):
    """The stream that the receivers of one layout are sent.

    Attributes:
        layout: `layout.layout_digest` of what they keep; None: all of every tensor.
        receivers: Their indices among the sender's receivers.
        first_byte: Where its share begins in the buffers, which lie one behind the other; a
            multiple of `ALIGNMENT_BYTES`. Its buckets lie there one behind the other too.
        bucket_bytes: Size of its buckets, likewise.
    """

    layout: str | None
    receivers: tuple[int, ...]
    first_byte: int
    bucket_bytes: int


def share_buffers(
    layouts: Sequence[str | None], buffer_bytes: int, buffers: int
) -> Result[tuple[SharedStream, ...], TooManyLayouts]:
    """The streams of one sender, in the order of their first receivers.

    Args:
        layouts: The digest of each receiver's layout.
        buffer_bytes: Size of each of the sender's buffers, a multiple of `ALIGNMENT_BYTES`.
        buffers: How many there are, which is how many buckets each stream has at a time.
    """
    receivers: dict[str | None, list[int]] = {}
    for index, layout in enumerate(layouts):
        receivers.setdefault(layout, []).append(index)
    each = buffer_bytes // max(1, len(receivers)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if not each:
        return Failure(TooManyLayouts(layouts=len(receivers), buffer_bytes=buffer_bytes))
    return Success(
        tuple(
            SharedStream(layout, tuple(own), index * buffers * each, each)
            for index, (layout, own) in enumerate(receivers.items())
        )
    )
