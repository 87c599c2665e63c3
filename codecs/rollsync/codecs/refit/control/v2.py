"""Version 2 of a control message: tied weights are named, plans compared, layouts reported, tensors
read directly, buckets come and go in parts, and rollout workers relay."""

from __future__ import annotations

from typing import Final, Literal

from rollsync.codecs.canonical import Natural, Wire
from rollsync.codecs.refit.control import v1

_ALL: Final = 2**63 - 1
"""More bytes than a bucket has."""


class Hello(Wire, frozen=True, kw_only=True, tag="hello"):
    """The sender introduces itself."""

    nonce: bytes
    proof: bytes
    sender_rank: Natural
    relays: bool
    rollout_rank: Natural
    train_world_size: Natural
    rollout_world_size: Natural
    bucket_bytes: Natural
    buckets: Natural
    memory_id: str


class PlanOffered(Wire, frozen=True, kw_only=True, tag="plan_offered"):
    """What the sender has declared."""

    digest: str | None


class PlanAnswered(Wire, frozen=True, kw_only=True, tag="plan_answered"):
    """What the receiver has declared, and what it keeps."""

    digest: str | None
    layout: str | None


class PlanDeclared(Wire, frozen=True, kw_only=True, tag="plan_declared"):
    """The sender's declaration."""

    plan: bytes


class LayoutRequested(Wire, frozen=True, kw_only=True, tag="layout_requested"):
    """The sender asks for the layout."""


class Part(Wire, frozen=True, kw_only=True):
    """A box of elements of one tensor."""

    name: str
    starts: tuple[Natural, ...]
    sizes: tuple[Natural, ...]


class LayoutReported(Wire, frozen=True, kw_only=True, tag="layout_reported"):
    """What the receiver keeps."""

    parts: tuple[Part, ...]


class StreamBegins(Wire, frozen=True, kw_only=True, tag="stream_begins"):
    """How the buckets come."""

    first_byte: Natural
    bucket_bytes: Natural
    layout: str | None


class Alias(Wire, frozen=True, kw_only=True):
    """A further name of a tensor."""

    name: str
    tensor: str


class BucketFilled(Wire, frozen=True, kw_only=True, tag="bucket_filled"):
    """A part of a bucket may be read."""

    bucket: Natural
    begin_bytes: Natural
    filled_bytes: Natural
    checksum: str | None
    pieces: tuple[v1.Piece, ...]
    aliases: tuple[Alias, ...]


class BucketReleased(Wire, frozen=True, kw_only=True, tag="bucket_released"):
    """Everything before a byte of a bucket was loaded."""

    bucket: Natural
    released_bytes: Natural


class ProbeOffered(Wire, frozen=True, kw_only=True, tag="probe_offered"):
    """Bytes to try to read."""

    agent: bytes | None
    address: Natural
    contents: bytes


class DestinationsOffered(Wire, frozen=True, kw_only=True, tag="destinations_offered"):
    """What the receiver reads itself, by digest."""

    digest: str | None


class DestinationsAnswered(Wire, frozen=True, kw_only=True, tag="destinations_answered"):
    """Whether the sender knows them."""

    known: bool


class Region(Wire, frozen=True, kw_only=True):
    """Equally long runs of bytes at equal distances."""

    offset: Natural
    run_bytes: Natural
    runs: Natural
    stride_bytes: Natural


class Destination(Wire, frozen=True, kw_only=True):
    """Parts of one tensor."""

    name: str
    shape: tuple[Natural, ...]
    dtype: str
    regions: tuple[Region, ...]


class DestinationsReported(Wire, frozen=True, kw_only=True, tag="destinations_reported"):
    """What the receiver reads itself."""

    destinations: tuple[Destination, ...]


class OfferedTensor(Wire, frozen=True, kw_only=True):
    """A tensor in the sender's memory."""

    name: str
    address: Natural
    size_bytes: Natural
    checksum: str | None


class TensorsOffered(Wire, frozen=True, kw_only=True, tag="tensors_offered"):
    """Tensors may be read."""

    offer: Natural
    agent: bytes | None
    memory: Literal["DRAM", "VRAM"]
    device: Natural
    tensors: tuple[OfferedTensor, ...]


class TensorHashed(Wire, frozen=True, kw_only=True, tag="tensor_hashed"):
    """The checksum of the last of them."""

    offer: Natural
    checksum: str


class TensorsTaken(Wire, frozen=True, kw_only=True, tag="tensors_taken"):
    """They have been read."""

    offer: Natural


class Failed(Wire, frozen=True, kw_only=True, tag="failed"):
    """A worker gives up."""

    worker: str
    stage: str
    tensor: str
    message: str


ControlBody = (
    v1.Challenge
    | Hello
    | v1.Welcome
    | v1.MemoryOffered
    | PlanOffered
    | PlanAnswered
    | PlanDeclared
    | LayoutRequested
    | LayoutReported
    | StreamBegins
    | BucketFilled
    | BucketReleased
    | ProbeOffered
    | DestinationsOffered
    | DestinationsAnswered
    | DestinationsReported
    | TensorsOffered
    | TensorHashed
    | TensorsTaken
    | v1.StreamEnded
    | v1.StreamAccepted
    | Failed
)


class ControlMessage(Wire, frozen=True, kw_only=True):
    """The message."""

    body: ControlBody


def from_v1(message: v1.ControlMessage) -> ControlMessage:
    """The message: buckets came and went whole, no tensor had further names, only policy workers
    sent, and who failed did not say on which side it was."""
    match message.body:
        case v1.Hello() as body:
            return ControlMessage(body=_hello(body))
        case v1.BucketReleased() as body:
            return ControlMessage(body=BucketReleased(bucket=body.bucket, released_bytes=_ALL))
        case v1.BucketFilled() as body:
            return ControlMessage(body=_filled(body))
        case v1.Failed() as body:
            return ControlMessage(
                body=Failed(
                    worker=f"worker {body.rank}",
                    stage=body.stage,
                    tensor=body.tensor,
                    message=body.message,
                )
            )
        case body:
            return ControlMessage(body=body)


def _hello(body: v1.Hello) -> Hello:
    return Hello(
        nonce=body.nonce,
        proof=body.proof,
        sender_rank=body.policy_rank,
        relays=False,
        rollout_rank=body.rollout_rank,
        train_world_size=body.train_world_size,
        rollout_world_size=body.rollout_world_size,
        bucket_bytes=body.bucket_bytes,
        buckets=body.buckets,
        memory_id=body.memory_id,
    )


def _filled(body: v1.BucketFilled) -> BucketFilled:
    return BucketFilled(
        bucket=body.bucket,
        begin_bytes=0,
        filled_bytes=body.filled_bytes,
        checksum=body.checksum,
        pieces=body.pieces,
        aliases=(),
    )
