"""What two ends of a weight stream tell each other beside the payload, as values.

One connection carries one stream. The two ends prove to each other that they know the run's
secret (`Challenge`, `Hello`, `Welcome`), then the sender announces bucket after bucket, each of
which the receiver releases when it needs it no more; `StreamEnded` says what the whole stream was,
and `Failed` may come from either end at any time and is the last message.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Challenge(Struct, frozen=True, kw_only=True, tag="challenge"):
    """The receiver's first message: random bytes that the sender's proof has to cover."""

    nonce: bytes


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """The sender's first message: who it is, what it believes, and its proof."""

    nonce: bytes
    proof: bytes
    policy_rank: int
    rollout_rank: int
    """The rank that the sender means to send to."""
    train_world_size: int
    rollout_world_size: int
    bucket_bytes: int
    buckets: int
    """Transfer buffers that the sender rotates through."""
    memory_id: str
    """Names the sender's buffers: a receiver that has mapped them need not do it again."""


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """The receiver's proof, and whether it needs the buffers handed over."""

    proof: bytes
    needs_memory: bool


class MemoryOffered(Struct, frozen=True, kw_only=True, tag="memory_offered"):
    """Where the sender's buffers are, for a receiver that reads them by NIXL."""

    agent: bytes
    """The metadata of the sender's NIXL agent: opaque here, and given to NIXL as it is."""
    memory: Literal["DRAM", "VRAM"]
    device: int
    """Index of the device that has the buffers; 0 for the host's memory."""
    addresses: tuple[int, ...]
    """The first byte of each buffer, in the sender's address space."""


class Piece(Struct, frozen=True, kw_only=True, gc=False):
    """The part of one tensor that lies in one bucket; see `buckets.Chunk`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    chunk_offset: int
    chunk_bytes: int


class BucketFilled(Struct, frozen=True, kw_only=True, tag="bucket_filled"):
    """A bucket is packed and may be read."""

    bucket: int
    """Index in the stream, from 0; it lies in buffer `bucket % buckets`."""
    filled_bytes: int
    checksum: str | None
    """XXH3, 64 bits, hexadecimal, of the filled bytes; None when checksums are off."""
    pieces: tuple[Piece, ...]


class BucketReleased(Struct, frozen=True, kw_only=True, tag="bucket_released"):
    """The receiver has what was in the bucket: its buffer may be filled again."""

    bucket: int


class StreamEnded(Struct, frozen=True, kw_only=True, tag="stream_ended"):
    """There are no further buckets."""

    buckets: int
    tensors: int
    payload_bytes: int
    digest: str
    """XXH3, 128 bits, hexadecimal, over the announcements of all buckets."""


class StreamAccepted(Struct, frozen=True, kw_only=True, tag="stream_accepted"):
    """The receiver has everything that the sender says it sent."""


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """One end gives up."""

    rank: int
    stage: str
    tensor: str
    """The tensor being worked on; empty when none was."""
    message: str


ControlBody = (
    Challenge
    | Hello
    | Welcome
    | MemoryOffered
    | BucketFilled
    | BucketReleased
    | StreamEnded
    | StreamAccepted
    | Failed
)


class ControlMessage(Struct, frozen=True, kw_only=True):
    """One message of a stream."""

    body: ControlBody
