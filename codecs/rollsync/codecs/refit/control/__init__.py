"""`refit.control`: one message between the two ends of a weight stream.

The domain structs have the shape of the wire structs, so they are written as they are, but for the
greeting, the parts of a layout and the regions of a destination.
"""

from __future__ import annotations

from typing import Final, assert_never

from returns.result import Result, Success

from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.refit.control import direct, v1, v2
from rollsync.pure.refit import control
from rollsync.pure.refit.layout import Box, Part


def to_wire(message: control.ControlMessage) -> control.ControlMessage | v2.ControlMessage:
    """The message, or its wire struct where that has another shape."""
    body = message.body
    if isinstance(body, control.Hello):
        return v2.ControlMessage(body=_hello_to_wire(body))
    if isinstance(body, control.LayoutReported):
        parts = tuple(
            v2.Part(name=part.name, starts=part.box.starts, sizes=part.box.sizes)
            for part in body.parts
        )
        return v2.ControlMessage(body=v2.LayoutReported(parts=parts))
    if isinstance(body, control.DestinationsReported):
        reported = tuple(direct.destination_to_wire(each) for each in body.destinations)
        return v2.ControlMessage(body=v2.DestinationsReported(destinations=reported))
    return message


def from_wire(wire: v2.ControlMessage) -> Result[control.ControlMessage, Refusal]:
    """The message."""
    return Success(control.ControlMessage(body=_body(wire.body)))


def _body(wire: v2.ControlBody) -> control.ControlBody:
    match wire:
        case v2.BucketFilled():
            return control.BucketFilled(
                bucket=wire.bucket,
                begin_bytes=wire.begin_bytes,
                filled_bytes=wire.filled_bytes,
                checksum=wire.checksum,
                pieces=tuple(_piece(piece) for piece in wire.pieces),
                aliases=tuple(control.Alias(name=a.name, tensor=a.tensor) for a in wire.aliases),
            )
        case v2.BucketReleased():
            return control.BucketReleased(bucket=wire.bucket, released_bytes=wire.released_bytes)
        case v1.StreamEnded():
            return control.StreamEnded(
                buckets=wire.buckets,
                tensors=wire.tensors,
                payload_bytes=wire.payload_bytes,
                digest=wire.digest,
            )
        case v1.StreamAccepted():
            return control.StreamAccepted()
        case v2.Failed():
            return control.Failed(
                worker=wire.worker, stage=wire.stage, tensor=wire.tensor, message=wire.message
            )
        case (
            v2.ProbeOffered()
            | v2.DestinationsOffered()
            | v2.DestinationsAnswered()
            | v2.DestinationsReported()
            | v2.TensorsOffered()
            | v2.TensorHashed()
            | v2.TensorsTaken()
        ):
            return direct.body_from_wire(wire)
        case _:
            return _before_the_buckets(wire)


def _before_the_buckets(
    wire: v1.Challenge
    | v2.Hello
    | v1.Welcome
    | v1.MemoryOffered
    | v2.PlanOffered
    | v2.PlanAnswered
    | v2.PlanDeclared
    | v2.LayoutRequested
    | v2.LayoutReported
    | v2.StreamBegins,
) -> control.ControlBody:
    match wire:
        case v1.Challenge():
            return control.Challenge(nonce=wire.nonce)
        case v2.Hello():
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
        case v2.PlanOffered():
            return control.PlanOffered(digest=wire.digest)
        case v2.PlanAnswered():
            return control.PlanAnswered(digest=wire.digest, layout=wire.layout)
        case v2.PlanDeclared():
            return control.PlanDeclared(plan=wire.plan)
        case v2.LayoutRequested():
            return control.LayoutRequested()
        case v2.LayoutReported():
            return control.LayoutReported(
                parts=tuple(Part(part.name, Box(part.starts, part.sizes)) for part in wire.parts)
            )
        case v2.StreamBegins():
            return control.StreamBegins(
                first_byte=wire.first_byte, bucket_bytes=wire.bucket_bytes, layout=wire.layout
            )
        case _:
            assert_never(wire)


def _hello_to_wire(hello: control.Hello) -> v2.Hello:
    return v2.Hello(
        nonce=hello.nonce,
        proof=hello.proof,
        sender_rank=hello.sender_rank,
        relays=hello.relays,
        rollout_rank=hello.rollout_rank,
        train_world_size=hello.train_world_size,
        rollout_world_size=hello.rollout_world_size,
        bucket_bytes=hello.buffer_bytes,
        buckets=hello.buffers,
        memory_id=hello.memory_id,
    )


def _hello(wire: v2.Hello) -> control.Hello:
    return control.Hello(
        nonce=wire.nonce,
        proof=wire.proof,
        sender_rank=wire.sender_rank,
        relays=wire.relays,
        rollout_rank=wire.rollout_rank,
        train_world_size=wire.train_world_size,
        rollout_world_size=wire.rollout_world_size,
        buffer_bytes=wire.bucket_bytes,
        buffers=wire.buckets,
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
    history=first(v1.ControlMessage).then(v2.ControlMessage, v2.from_v1),
    to_wire=to_wire,
    from_wire=from_wire,
)
