"""A stream's share of the transfer buffers as one ring: where a byte of it lies, and when it may.

A byte's *position* counts through all buckets, `bucket * bucket_bytes + offset`. There is memory
for a few buckets, one behind the other, and they rotate through it. So the bytes of a tensor, which
is cut only where a bucket ends, lie at consecutive positions; they lie in one piece in memory too,
unless they go round the end of the ring.

Rules kept here: a position is filled again only when it was released a whole ring ago; a tensor
that a receiver waits to have whole in the ring can come to lie there before anything of it is
released, so that neither end waits for the other.

A relay has a ring of its own, of the same size, in which every byte has the position that it has in
its sender's; its receivers read from that.
"""

from __future__ import annotations

from msgspec import Struct

from rollsync.pure.refit.buckets import ALIGNMENT_BYTES


class Ring(Struct, frozen=True, kw_only=True):
    """The ring of one stream.

    Attributes:
        bucket_bytes: Size of a bucket.
        buckets: How many there are in memory at a time.
        mirrored: Whether the memory goes on, behind its end, with its beginning.
    """

    bucket_bytes: int
    buckets: int
    mirrored: bool

    @property
    def ring_bytes(self) -> int:
        """Size of all of it."""
        return self.bucket_bytes * self.buckets

    def position(self, bucket: int, offset: int) -> int:
        """Of a byte of a bucket."""
        return bucket * self.bucket_bytes + offset

    def bucket_at(self, position: int) -> tuple[int, int]:
        """The bucket, and the byte in it, of a position."""
        return divmod(position, self.bucket_bytes)

    def place(self, position: int) -> int:
        """The byte of the memory at which a position lies."""
        return position % self.ring_bytes

    def free_until(self, released: int) -> int:
        """Before which position may be filled when what lies before `released` is released."""
        return released + self.ring_bytes

    def may_fill(self, position: int, released: int) -> bool:
        """Whether what lies before `position` may be filled when what lies before `released` is
        released."""
        return position <= self.free_until(released)

    def holds(self, position: int, size: int) -> bool:
        """Whether a tensor of `size` bytes from `position` on can be seen in one piece once all of
        it has come, while nothing of it is released.

        What is released may end before the padding in front of the tensor.
        """
        if size + ALIGNMENT_BYTES > self.ring_bytes:
            return False
        return self.mirrored or self.place(position) + size <= self.ring_bytes
