"""Sample values of `refit.control`: one of each message."""

from __future__ import annotations

from typing import Final

from rollsync.pure.refit import control
from rollsync.pure.refit.layout import Box, Part
from rollsync.pure.refit.load_plan import Region

LARGEST: Final = 2**63 - 1

HELLO: Final = control.Hello(
    nonce=b"\x00\x01",
    proof=b"\xff" * 4,
    sender_rank=1,
    relays=True,
    rollout_rank=2,
    train_world_size=2,
    rollout_world_size=4,
    buffer_bytes=512,
    buffers=2,
    memory_id="m",
)

SAMPLES: Final = {
    "full": control.ControlMessage(
        body=control.BucketFilled(
            bucket=3,
            begin_bytes=256,
            filled_bytes=300,
            checksum="0123456789abcdef",
            pieces=(
                control.Piece(
                    name="a.weight",
                    shape=(2, 3),
                    dtype="bfloat16",
                    offset=0,
                    chunk_offset=0,
                    chunk_bytes=12,
                ),
                control.Piece(
                    name="größe",
                    shape=(),
                    dtype="float32",
                    offset=256,
                    chunk_offset=0,
                    chunk_bytes=4,
                ),
            ),
            aliases=(
                control.Alias(name="b.weight", tensor="a.weight"),
                control.Alias(name="größer", tensor="größe"),
            ),
        )
    ),
    "empty": control.ControlMessage(
        body=control.BucketFilled(
            bucket=0, begin_bytes=0, filled_bytes=0, checksum=None, pieces=(), aliases=()
        )
    ),
    "challenge": control.ControlMessage(body=control.Challenge(nonce=b"\x80" * 8)),
    "hello": control.ControlMessage(body=HELLO),
    "welcome": control.ControlMessage(body=control.Welcome(proof=b"", needs_memory=True)),
    "memory": control.ControlMessage(
        body=control.MemoryOffered(
            agent=b"\x00\xff", memory="VRAM", device=1, addresses=(2**47 - 1, 0)
        )
    ),
    "plan-offered": control.ControlMessage(body=control.PlanOffered(digest="a0" * 32)),
    "plan-answered": control.ControlMessage(body=control.PlanAnswered(digest=None, layout="b1")),
    "plan-declared": control.ControlMessage(body=control.PlanDeclared(plan=b"\x00\xff")),
    "layout-requested": control.ControlMessage(body=control.LayoutRequested()),
    "layout-reported": control.ControlMessage(
        body=control.LayoutReported(
            parts=(
                Part("größe", Box((0, LARGEST), (1, 0))),
                Part("scalar", Box((), ())),
            )
        )
    ),
    "begins": control.ControlMessage(
        body=control.StreamBegins(first_byte=512, bucket_bytes=256, layout=None)
    ),
    "released": control.ControlMessage(
        body=control.BucketReleased(bucket=LARGEST, released_bytes=1)
    ),
    "probe": control.ControlMessage(
        body=control.ProbeOffered(agent=None, address=2**47 - 1, contents=b"\x00\xff")
    ),
    "destinations-offered": control.ControlMessage(body=control.DestinationsOffered(digest="c2")),
    "destinations-answered": control.ControlMessage(body=control.DestinationsAnswered(known=True)),
    "destinations-reported": control.ControlMessage(
        body=control.DestinationsReported(
            destinations=(
                control.Destination(
                    name="größe",
                    shape=(2, 3),
                    dtype="bfloat16",
                    regions=(Region(0, 12), Region(2, 2, 2, 6)),
                ),
                control.Destination(name="elsewhere", shape=(), dtype="int64", regions=()),
            )
        )
    ),
    "offered": control.ControlMessage(
        body=control.TensorsOffered(
            offer=1,
            agent=b"\x00\xff",
            memory="DRAM",
            device=0,
            tensors=(
                control.OfferedTensor(
                    name="a.weight", address=2**47 - 1, size_bytes=12, checksum="0123456789abcdef"
                ),
                control.OfferedTensor(name="вес", address=0, size_bytes=0, checksum=None),
            ),
        )
    ),
    "hashed": control.ControlMessage(
        body=control.TensorHashed(offer=LARGEST, checksum="0123456789abcdef")
    ),
    "taken": control.ControlMessage(body=control.TensorsTaken(offer=LARGEST)),
    "ended": control.ControlMessage(
        body=control.StreamEnded(buckets=1, tensors=2, payload_bytes=LARGEST, digest="ab")
    ),
    "accepted": control.ControlMessage(body=control.StreamAccepted()),
    "failed": control.ControlMessage(
        body=control.Failed(worker="rollout 0", stage="load", tensor="", message="вес 𝄞")
    ),
}
