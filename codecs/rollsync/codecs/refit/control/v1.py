"""Version 1 of a control message between the two ends of a weight stream."""

from __future__ import annotations

from typing import Literal

from rollsync.codecs.canonical import Natural, Wire


class Challenge(Wire, frozen=True, kw_only=True, tag="challenge"):
    """The receiver's nonce."""

    nonce: bytes


class Hello(Wire, frozen=True, kw_only=True, tag="hello"):
    """The sender introduces itself."""

    nonce: bytes
    proof: bytes
    policy_rank: Natural
    rollout_rank: Natural
    train_world_size: Natural
    rollout_world_size: Natural
    bucket_bytes: Natural
    buckets: Natural
    memory_id: str


class Welcome(Wire, frozen=True, kw_only=True, tag="welcome"):
    """The receiver's proof."""

    proof: bytes
    needs_memory: bool


class MemoryOffered(Wire, frozen=True, kw_only=True, tag="memory_offered"):
    """The sender's buffers, for NIXL."""

    agent: bytes
    memory: Literal["DRAM", "VRAM"]
    device: Natural
    addresses: tuple[Natural, ...]


class Piece(Wire, frozen=True, kw_only=True):
    """Part of a tensor in a bucket."""

    name: str
    shape: tuple[Natural, ...]
    dtype: str
    offset: Natural
    chunk_offset: Natural
    chunk_bytes: Natural


class BucketFilled(Wire, frozen=True, kw_only=True, tag="bucket_filled"):
    """A bucket may be read."""

    bucket: Natural
    filled_bytes: Natural
    checksum: str | None
    pieces: tuple[Piece, ...]


class BucketReleased(Wire, frozen=True, kw_only=True, tag="bucket_released"):
    """A bucket was loaded."""

    bucket: Natural


class StreamEnded(Wire, frozen=True, kw_only=True, tag="stream_ended"):
    """There are no further buckets."""

    buckets: Natural
    tensors: Natural
    payload_bytes: Natural
    digest: str


class StreamAccepted(Wire, frozen=True, kw_only=True, tag="stream_accepted"):
    """Everything arrived."""


class Failed(Wire, frozen=True, kw_only=True, tag="failed"):
    """One end gives up."""

    rank: Natural
    stage: str
    tensor: str
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


class ControlMessage(Wire, frozen=True, kw_only=True):
    """The message."""

    body: ControlBody
