"""The stream that the receivers of one layout are sent: packed once, announced to each of them.

Rules kept here: a bucket is filled again only when every receiver has released it; and a tensor
that is tied to one in the same bucket is named, not packed again, if its bytes are the same. (That
its storage is the same proves nothing: a trainer may gather every tensor into one buffer.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.control import (
    Alias,
    BucketFilled,
    BucketReleased,
    Piece,
    StreamAccepted,
    StreamBegins,
    StreamEnded,
)
from rollsync.pure.refit.layout import Box, SentPart
from rollsync.pure.refit.sharing import SharedStream
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.media import SenderMemory
from rollsync.shell.refit.engines.memory import bucket_checksum
from rollsync.shell.refit.engines.packing import StreamPacker, TypedBuffer


class _Packed(NamedTuple):
    """A tensor that lies whole in the bucket that is being filled."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


class Outlet:
    """Packs one stream and announces its buckets.

    Args:
        memory: the sender's buffers, of which this stream has a region.
        share: that region, and which layout this is.
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
        self._checksum = checksum
        end = share.first_byte + share.bucket_bytes
        self._regions = [TypedBuffer(each[share.first_byte : end]) for each in memory.buffers]
        self._packer = StreamPacker(share.bucket_bytes)
        self._released = [-1] * len(channels)
        self._digest = xxhash.xxh3_128()
        self._bucket = 0
        self._filled_bytes = 0
        self._pieces: list[Piece] = []
        self._aliases: list[Alias] = []
        # By address: what lies in the current bucket, for tensors that are tied to it.
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
                await self._pack(part.spec.name, _inside(tensor, part.box))
                self._name_also(part.spec.aliases, part.spec.name)

    async def end(self) -> None:
        """Announce the last bucket, and the end; the receivers have yet to accept it."""
        sent = 0
        if self._pieces:
            await self._announce()
            sent = self._bucket + 1
        await self._await_release(sent - 1)
        ended = StreamEnded(
            buckets=sent,
            tensors=self._packer.tensors,
            payload_bytes=self._packer.payload_bytes,
            digest=self._digest.hexdigest(),
        )
        for channel in self._channels:
            channel.stage, channel.tensor = "waited for the stream's acceptance", ""
            await channel.send(ended)

    async def await_acceptance(self) -> None:
        """Wait until every receiver has everything."""
        for channel in self._channels:
            body, _ = await channel.receive()
            if not isinstance(body, StreamAccepted):
                raise channel.unexpected(body)

    async def _pack(self, name: str, tensor: torch.Tensor) -> None:
        for part in self._packer.parts(name, tensor):
            if part.bucket != self._bucket:
                await self._announce()
                await self._begin_bucket(part.bucket)
                self._enter("packed", name)
            part.copy_into(self._regions[part.bucket % len(self._regions)])
            piece = part.piece
            self._pieces.append(piece)
            self._filled_bytes = piece.offset + piece.chunk_bytes
            if piece.chunk_bytes and piece.chunk_bytes == tensor.nbytes:
                self._packed[tensor.data_ptr()] = _Packed(
                    name, tensor.dtype, tensor.shape, piece.offset, self._filled_bytes
                )

    def _is_tied(self, name: str, tensor: torch.Tensor) -> bool:
        """Name the tensor beside the one that it is tied to, if that lies in the current bucket."""
        packed = self._packed.get(tensor.data_ptr())
        if packed is None or packed.dtype != tensor.dtype or packed.shape != tensor.shape:
            return False
        region = self._regions[self._bucket % len(self._regions)]
        own = tensor.contiguous().view(-1).view(torch.uint8)
        theirs = region.buffer[packed.start : packed.end]
        if own.device != theirs.device or not torch.equal(own, theirs):
            return False
        self._aliases.append(self._packer.also_named(name, packed.name))
        return True

    def _name_also(self, aliases: Sequence[str], name: str) -> None:
        for alias in aliases:
            self._aliases.append(self._packer.also_named(alias, name))

    async def _announce(self) -> None:
        """Tell every receiver that the current bucket is filled."""
        region = self._regions[self._bucket % len(self._regions)].buffer
        announcement = BucketFilled(
            bucket=self._bucket,
            filled_bytes=self._filled_bytes,
            checksum=bucket_checksum(region, self._filled_bytes) if self._checksum else None,
            pieces=tuple(self._pieces),
            aliases=tuple(self._aliases),
        )
        self._enter("announced a bucket")
        for index, channel in enumerate(self._channels):
            message = await channel.send(announcement)
            if index == 0:
                self._digest.update(message)

    async def _begin_bucket(self, bucket: int) -> None:
        """Wait until every receiver has released the bucket that lay in the next one's buffer."""
        await self._await_release(bucket - len(self._regions))
        self._bucket = bucket
        self._filled_bytes = 0
        self._pieces = []
        self._aliases = []
        self._packed.clear()

    async def _await_release(self, bucket: int) -> None:
        self._enter("waited for a bucket's release")
        for index, channel in enumerate(self._channels):
            while self._released[index] < bucket:
                body, _ = await channel.receive()
                if not isinstance(body, BucketReleased) or body.bucket > self._bucket:
                    raise channel.unexpected(body)
                self._released[index] = body.bucket

    def _enter(self, stage: str, tensor: str = "") -> None:
        for channel in self._channels:
            channel.stage, channel.tensor = stage, tensor


def _inside(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box of elements."""
    for dimension, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, start, size)
    return tensor
