"""What two ends of a weight stream tell each other beside the payload, as values.

One connection carries one stream. The two ends prove to each other that they know the run's
secret (`Challenge`, `Hello`, `Welcome`). They compare what was declared of the weights
(`PlanOffered`, `PlanAnswered`; when that differs, `PlanDeclared`), the receiver says what it keeps
of them (`LayoutRequested`, `LayoutReported`, where the sender does not know it yet), and the sender
says how the stream comes (`StreamBegins`). Then it announces bucket after bucket, part by part
(`BucketFilled`), and the receiver releases what it needs no more (`BucketReleased`); `StreamEnded`
says what the whole stream was, and the receiver accepts it (`StreamAccepted`). `Failed` may come
from either end at any time and is the last message.

A *buffer* is memory, of which a sender has a few; a *bucket* is what the stream is cut into, and
lies in the buffers; a *part* of a bucket is what one announcement covers.

The sender is a policy worker, or a rollout worker that relays: that one passes on what its own
sender says of the stream from `StreamBegins` on, and answers for its receivers.

Where both ends read directly, the same connection says what the receiver reads straight into its
parameters. After `StreamBegins` the sender offers a probe (`ProbeOffered`), the receiver says what
it will read, by digest (`DestinationsOffered`), and the sender whether it knows that
(`DestinationsAnswered`); if not, it is told (`DestinationsReported`). Then offers of tensors
(`TensorsOffered`) come between parts, the checksum of a very large tensor after its offer
(`TensorHashed`), and an offer is answered when all of it is read (`TensorsTaken`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from rollsync.pure.refit.layout import Part
from rollsync.pure.refit.load_plan import Region

MemoryKind = Literal["DRAM", "VRAM"]
"""Of the host or of a device."""


class Challenge(Struct, frozen=True, kw_only=True, tag="challenge"):
    """The receiver's first message: random bytes that the sender's proof has to cover."""

    nonce: bytes


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """The sender's first message: who it is, what it believes, and its proof."""

    nonce: bytes
    proof: bytes
    sender_rank: int
    """The sender's rank on its side."""
    relays: bool
    """Whether the sender is a rollout worker itself."""
    rollout_rank: int
    """The rank that the sender means to send to."""
    train_world_size: int
    rollout_world_size: int
    buffer_bytes: int
    """Size of one of the sender's transfer buffers; `bucket_bytes` on the wire."""
    buffers: int
    """How many it has, which lie one behind the other; `buckets` on the wire."""
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
    memory: MemoryKind
    device: int
    """Index of the device that has the buffers; 0 for the host's memory."""
    addresses: tuple[int, ...]
    """The first byte of each buffer, in the sender's address space; one follows the other."""


class PlanOffered(Struct, frozen=True, kw_only=True, tag="plan_offered"):
    """What the sender knows of its stream beforehand."""

    digest: str | None
    """`agreement.plan_digest` of its declaration; None when it has none."""


class PlanAnswered(Struct, frozen=True, kw_only=True, tag="plan_answered"):
    """What the receiver expects; with another digest than the offered one, the sender has to
    declare its plan, and the receiver finds the difference."""

    digest: str | None
    """That of the receiver's declaration; None when it has none, and takes what comes. A relay
    answers with that of a receiver of its own which has another than the offered one."""
    layout: str | None
    """`layout.layout_digest` of what this rank keeps; None: all of every tensor. A relay keeps all
    unless its receivers keep what it does."""


class PlanDeclared(Struct, frozen=True, kw_only=True, tag="plan_declared"):
    """The sender's declaration, for a receiver that has another."""

    plan: bytes
    """An envelope of kind `refit.plan`."""


class LayoutRequested(Struct, frozen=True, kw_only=True, tag="layout_requested"):
    """The sender does not know the layout of that digest."""


class LayoutReported(Struct, frozen=True, kw_only=True, tag="layout_reported"):
    """What the receiver keeps of each declared tensor."""

    parts: tuple[Part, ...]


class StreamBegins(Struct, frozen=True, kw_only=True, tag="stream_begins"):
    """How the buckets of this stream come."""

    first_byte: int
    """Where in the sender's buffers, one behind the other, this stream's buckets begin: receivers
    of different layouts share them."""
    bucket_bytes: int
    """Size of one bucket of this stream: a buffer's, or less where layouts share the buffers. As
    many buckets lie there at a time, one behind the other, as there are buffers."""
    layout: str | None
    """The layout that is sent, which is the receiver's; None: all of every tensor."""


class Piece(Struct, frozen=True, kw_only=True, gc=False):
    """What lies of one tensor in one bucket; see `buckets.Chunk`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    chunk_offset: int
    chunk_bytes: int


class Alias(Struct, frozen=True, kw_only=True, gc=False):
    """A further name of a tensor (a tied weight), whose contents are not sent again."""

    name: str
    tensor: str
    """The name under which it is sent."""


class BucketFilled(Struct, frozen=True, kw_only=True, tag="bucket_filled"):
    """A further part of a bucket is packed and may be read."""

    bucket: int
    """Index in the stream, from 0; where in the buffers it lies, `ring.Ring` says."""
    begin_bytes: int
    """Where in the bucket the part begins, which is where the one announced before ended."""
    filled_bytes: int
    """Where it ends: how much of the bucket is filled now."""
    checksum: str | None
    """XXH3, 64 bits, hexadecimal, of the part; None when checksums are off."""
    pieces: tuple[Piece, ...]
    """Those that begin in the part."""
    aliases: tuple[Alias, ...]
    """Further names of tensors that are whole with this part."""


class BucketReleased(Struct, frozen=True, kw_only=True, tag="bucket_released"):
    """The receiver has everything before some byte of a bucket, which may be filled again."""

    bucket: int
    released_bytes: int
    """That byte: nothing of the bucket is kept before it, and nothing of the buckets before."""


class ProbeOffered(Struct, frozen=True, kw_only=True, tag="probe_offered"):
    """Some bytes of the sender's: a receiver that can read them can read its tensors."""

    agent: bytes | None
    """The metadata of the sender's NIXL agent; None when memory is read without NIXL."""
    address: int
    contents: bytes


class Destination(Struct, frozen=True, kw_only=True, gc=False):
    """A tensor of which a receiver reads parts straight into its parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    regions: tuple[Region, ...]
    """Those parts of its contents in row-major order, in the order in which they are hashed."""


class DestinationsOffered(Struct, frozen=True, kw_only=True, tag="destinations_offered"):
    """What the receiver reads itself in this stream."""

    digest: str | None
    """`direct.destinations_digest` of what it would report; None when it reads nothing."""


class DestinationsAnswered(Struct, frozen=True, kw_only=True, tag="destinations_answered"):
    """Whether the sender knows the destinations of that digest; if not, they are reported next."""

    known: bool


class DestinationsReported(Struct, frozen=True, kw_only=True, tag="destinations_reported"):
    """What the receiver reads itself."""

    destinations: tuple[Destination, ...]


class OfferedTensor(Struct, frozen=True, kw_only=True, gc=False):
    """A tensor that lies ready in the sender's memory, in row-major order."""

    name: str
    address: int
    size_bytes: int
    checksum: str | None
    """XXH3, 64 bits, hexadecimal, of the regions of its destination; None without checksums, and
    for a last tensor whose checksum follows in `TensorHashed`."""


class TensorsOffered(Struct, frozen=True, kw_only=True, tag="tensors_offered"):
    """Tensors that stay as they are until they are taken."""

    offer: int
    """Index in the stream, from 0."""
    agent: bytes | None
    """The metadata of the sender's NIXL agent, if there is more in it than was sent before."""
    memory: MemoryKind
    device: int
    tensors: tuple[OfferedTensor, ...]


class TensorHashed(Struct, frozen=True, kw_only=True, tag="tensor_hashed"):
    """The checksum of the last tensor of the newest offer, which is so large that receivers begin
    to read before it is hashed."""

    offer: int
    checksum: str


class TensorsTaken(Struct, frozen=True, kw_only=True, tag="tensors_taken"):
    """The receiver has read every tensor of an offer."""

    offer: int


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
    """One end gives up, or passes on that another worker did."""

    worker: str
    """Who failed: `policy 0` or `rollout 3`."""
    stage: str
    tensor: str
    """The tensor being worked on, or the first and the last of several; empty when none was."""
    message: str


ControlBody = (
    Challenge
    | Hello
    | Welcome
    | MemoryOffered
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
    | StreamEnded
    | StreamAccepted
    | Failed
)


class ControlMessage(Struct, frozen=True, kw_only=True):
    """One message of a stream."""

    body: ControlBody
