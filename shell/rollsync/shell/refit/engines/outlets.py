"""The stream that the receivers of one layout are sent: packed once, announced to each of them.

A bucket is announced in parts, so that they are still in the processor's cache when they are hashed
here, and checked and loaded there.

Rules kept here: memory is filled again only when every receiver has released it; nothing waits for
a release before all that is filled is announced; and a tensor that is tied to one in the same part
is named, not packed again, if its bytes are the same. (That
its storage is the same proves nothing: a trainer may gather every tensor into one buffer.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
import xxhash

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.control import (
    Alias,
    BucketFilled,
    Piece,
    StreamAccepted,
    StreamBegins,
    StreamEnded,
)
from rollsync.pure.refit.layout import SentPart
from rollsync.pure.refit.sharing import SharedStream
from rollsync.shell.refit.boxes import inside
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.connections import position_released
from rollsync.shell.refit.engines.media import SenderMemory
from rollsync.shell.refit.engines.packing import SLICE_BYTES, StreamPacker
from rollsync.shell.refit.engines.rings import RunningChecksum, StreamRing

PART_BYTES: Final = 4 * 1024 * 1024
"""How much is announced at a time: little enough to be in a cache, much beside a message's cost."""
PART_PIECES: Final = 256
"""How many tensors are announced at a time: both ends work on them longer than on their bytes."""
PARTS: Final = 4
"""Of how many parts a ring consists at least, so that one is packed while others are loaded."""


class _Packed(NamedTuple):
    """A tensor that becomes whole with the part that is being filled."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    position: int


class Outlet:
    """Packs one stream and announces its buckets, part by part.

    Args:
        memory: the sender's buffers, of which this stream has a share.
        share: that one, and which layout this is.
        channels: the receivers of that layout.
        parts: what they keep, by the name of a declared tensor; None: all of every tensor.
        checksum: whether buckets carry one.
    """

    def __init__(
        self,
        memory: SenderMemory,
        share: SharedStream,
        channels: Sequence[ControlChannel],
        parts: Mapping[str, Sequence[SentPart]] | None,
        *,
        checksum: bool,
    ) -> None:
        self._share = share
        self._channels = channels
        self._parts = parts
        self._ring = StreamRing(memory.buffers, share.first_byte, share.bucket_bytes)
        self._packer = StreamPacker(share.bucket_bytes)
        self._released = [0] * len(channels)
        self._digest = xxhash.xxh3_128()
        self._bucket = 0
        # All of the ring is free.
        self._free_until = self._ring.ring.free_until(0)
        # Of the bucket that is being filled: up to where it is, and up to where it is announced.
        self._filled_bytes = 0
        self._announced_bytes = self._hashed_bytes = 0
        self._part_bytes = min(PART_BYTES, self._ring.ring.ring_bytes // PARTS)
        self._pieces: list[Piece] = []
        self._aliases: list[Alias] = []
        self._checksum = RunningChecksum(self._ring, 0) if checksum else None
        # By address: what becomes whole with the current part, for tensors that are tied to it.
        self._packed: dict[int, _Packed] = {}

    async def begin(self) -> None:
        """Tell the receivers how the stream comes."""
        share = self._share
        begins = StreamBegins(
            first_byte=share.first_byte, bucket_bytes=share.bucket_bytes, layout=share.layout
        )
        for channel in self._channels:
            await channel.send(begins)

    async def put(self, declared: TensorSpec | None, name: str, tensor: torch.Tensor) -> None:
        """Send what the receivers keep of the next tensor.

        Args:
            declared: what it was declared as; None when it was not.
            name: its name.
            tensor: its contents; they may change when this returns.
        """
        if declared is None:
            if not self._is_tied(name, tensor):
                await self._pack(name, tensor)
        elif self._parts is None:
            await self._pack(name, tensor)
            self._name_also(declared.aliases, name)
        else:
            for part in self._parts.get(name, ()):
                await self._pack(part.spec.name, inside(tensor, part.box))
                self._name_also(part.spec.aliases, part.spec.name)

    async def flush(self) -> None:
        """Announce what was put so far: receivers have it before what is announced next."""
        await self._announce()

    async def end(self) -> None:
        """Announce the last part, and the end; the receivers have yet to accept it."""
        sent = self._bucket + 1 if self._packer.tensors else 0
        await self._announce()
        await self._await_release(self._ring.ring.position(self._bucket, self._filled_bytes))
        ended = StreamEnded(
            buckets=sent,
            tensors=self._packer.tensors,
            payload_bytes=self._packer.payload_bytes,
            digest=self._digest.hexdigest(),
        )
        for channel in self._channels:
            channel.enter("waited for the stream's acceptance")
            await channel.send(ended)

    async def await_acceptance(self) -> None:
        """Wait until every receiver has everything."""
        for channel in self._channels:
            body, _ = await channel.receive()
            if not isinstance(body, StreamAccepted):
                raise channel.unexpected(body)

    async def _pack(self, name: str, tensor: torch.Tensor) -> None:
        for chunk in self._packer.chunks(name, tensor):
            piece = chunk.piece
            if chunk.bucket != self._bucket:
                await self._announce()
                self._begin_bucket(chunk.bucket)
            start = chunk.bucket * self._share.bucket_bytes + piece.offset
            copy = chunk.copy_to(self._ring)
            begin = 0
            for end in copy.ends:
                if (
                    start + end > self._free_until
                    or self._filled_bytes - self._announced_bytes >= self._part_bytes
                    or len(self._pieces) >= PART_PIECES
                ):
                    await self._make_room(start + end)
                    self._enter("packed", name)
                if not begin:
                    self._pieces.append(piece)
                copy.to(begin, end)
                begin = end
                self._filled_bytes = piece.offset + end
                if self._filled_bytes - self._hashed_bytes >= SLICE_BYTES:
                    self._hash()
            if piece.chunk_bytes and piece.chunk_bytes == tensor.nbytes:
                self._packed[tensor.data_ptr()] = _Packed(name, tensor.dtype, tensor.shape, start)

    def _is_tied(self, name: str, tensor: torch.Tensor) -> bool:
        """Name the tensor beside the one that it is tied to, if that lies in the current bucket."""
        packed = self._packed.get(tensor.data_ptr())
        if packed is None or packed.dtype != tensor.dtype or packed.shape != tensor.shape:
            return False
        own = tensor.contiguous().view(-1).view(torch.uint8)
        theirs = self._ring.bytes(packed.position, len(own))
        if own.device != theirs.device or not torch.equal(own, theirs):
            return False
        self._aliases.append(self._packer.also_named(name, packed.name))
        return True

    def _name_also(self, aliases: Sequence[str], name: str) -> None:
        for alias in aliases:
            self._aliases.append(self._packer.also_named(alias, name))

    async def _make_room(self, position: int) -> None:
        """Announce what is filled, and wait until what lies before `position` may be filled."""
        await self._announce()
        if position > self._free_until:
            await self._await_release(position - self._ring.ring.ring_bytes)

    def _hash(self) -> None:
        """Hash what was filled since the last time, while it is in the cache."""
        if self._checksum is not None:
            self._checksum.take(self._ring.ring.position(self._bucket, self._filled_bytes))
        self._hashed_bytes = self._filled_bytes

    async def _announce(self) -> None:
        """Tell every receiver what was filled since the last time, if anything was."""
        if not self._pieces and self._filled_bytes == self._announced_bytes:
            return
        self._hash()
        announcement = BucketFilled(
            bucket=self._bucket,
            begin_bytes=self._announced_bytes,
            filled_bytes=self._filled_bytes,
            checksum=None if self._checksum is None else self._checksum.hexdigest(),
            pieces=tuple(self._pieces),
            aliases=tuple(self._aliases),
        )
        self._begin_part(self._filled_bytes)
        self._enter("announced a bucket")
        for index, channel in enumerate(self._channels):
            # A receiver that cannot send its releases does not take announcements either.
            channel.take_in()
            message = await channel.send(announcement)
            if index == 0:
                self._digest.update(message)

    def _begin_bucket(self, bucket: int) -> None:
        self._bucket = bucket
        self._filled_bytes = 0
        self._begin_part(0)

    def _begin_part(self, begin_bytes: int) -> None:
        self._announced_bytes = self._hashed_bytes = begin_bytes
        self._pieces = []
        self._aliases = []
        self._packed.clear()
        if self._checksum is not None:
            position = self._ring.ring.position(self._bucket, begin_bytes)
            self._checksum = RunningChecksum(self._ring, position)

    async def _await_release(self, position: int) -> None:
        """Wait until every receiver has released what lies before `position`."""
        self._enter("waited for a bucket's release")
        ring = self._ring.ring
        announced = ring.position(self._bucket, self._announced_bytes)
        for index, channel in enumerate(self._channels):
            while (before := self._released[index]) < position:
                body, _ = await channel.receive()
                self._released[index] = position_released(
                    channel, body, ring, before=before, announced=announced
                )
        self._free_until = ring.free_until(min(self._released))

    def _enter(self, stage: str, tensor: str = "") -> None:
        for channel in self._channels:
            channel.enter(stage, tensor)
