"""`refit.control`: one message between the two ends of a weight stream.

The domain structs have the shape of the wire structs, so they are written as they are.
"""

from __future__ import annotations

from typing import Final, assert_never

from returns.result import Result, Success

from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.refit.control import v1
from rollsync.pure.refit import control


def to_wire(message: control.ControlMessage) -> control.ControlMessage:
    """The message, whose bytes are those of its wire struct."""
    return message


def from_wire(wire: v1.ControlMessage) -> Result[control.ControlMessage, Refusal]:
    """The message."""
    return Success(control.ControlMessage(body=_body(wire.body)))


def _body(wire: v1.ControlBody) -> control.ControlBody:
    match wire:
        case v1.BucketFilled():
            return control.BucketFilled(
                bucket=wire.bucket,
                filled_bytes=wire.filled_bytes,
                checksum=wire.checksum,
                pieces=tuple(_piece(piece) for piece in wire.pieces),
            )
        case v1.BucketReleased():
            return control.BucketReleased(bucket=wire.bucket)
        case v1.Challenge():
            return control.Challenge(nonce=wire.nonce)
        case v1.Hello():
            return _hello(wire)
        case v1.Welcome():
            return control.Welcome(proof=wire.proof, needs_memory=wire.needs_memory)
        case v1.MemoryOffered():
            return control.MemoryOffered(
                agent=wire.agent,
                memory=wire.memory,
                device=wire.device,
                addresses=wire.addresses,
            )
        case v1.StreamEnded():
            return control.StreamEnded(
                buckets=wire.buckets,
                tensors=wire.tensors,
                payload_bytes=wire.payload_bytes,
                digest=wire.digest,
            )
        case v1.StreamAccepted():
            return control.StreamAccepted()
        case v1.Failed():
            return control.Failed(
                rank=wire.rank, stage=wire.stage, tensor=wire.tensor, message=wire.message
            )
        case _:
            assert_never(wire)


def _hello(wire: v1.Hello) -> control.Hello:
    return control.Hello(
        nonce=wire.nonce,
        proof=wire.proof,
        policy_rank=wire.policy_rank,
        rollout_rank=wire.rollout_rank,
        train_world_size=wire.train_world_size,
        rollout_world_size=wire.rollout_world_size,
        bucket_bytes=wire.bucket_bytes,
        buckets=wire.buckets,
        memory_id=wire.memory_id,
    )


def _piece(wire: v1.Piece) -> control.Piece:
    return control.Piece(
        name=wire.name,
        shape=wire.shape,
        dtype=wire.dtype,
        offset=wire.offset,
        chunk_offset=wire.chunk_offset,
        chunk_bytes=wire.chunk_bytes,
    )


CONTROL_MESSAGE: Final = kind(
    "refit.control",
    domain=control.ControlMessage,
    history=first(v1.ControlMessage),
    to_wire=to_wire,
    from_wire=from_wire,
)
