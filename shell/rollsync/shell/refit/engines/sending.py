"""The sending end of one stream.

Rule kept here: whatever ends the stream early is told to every receiver before it is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.control import Failed
from rollsync.pure.refit.layout import SentPart
from rollsync.pure.refit.sharing import share_buffers
from rollsync.shell.refit.engines.base import Weights
from rollsync.shell.refit.engines.connections import Connections, Introduction, Receiver
from rollsync.shell.refit.engines.declared import Declaration, DeclaredOrder, Repeated
from rollsync.shell.refit.engines.direct_sending import DirectSender
from rollsync.shell.refit.engines.errors import told_of
from rollsync.shell.refit.engines.media import SenderMemory
from rollsync.shell.refit.engines.opening import offer_plan
from rollsync.shell.refit.engines.outlets import Outlet
from rollsync.shell.refit.errors import accepted


class SendingStream:
    """Sends one stream.

    Args:
        memory: this worker's buffers, which the streams for different layouts share.
        me: who this worker is.
        checksum: whether buckets carry one.
        declaration: what the weights were declared as; None when they were not.
        direct: offers receivers what they read themselves; None when they read nothing so.
    """

    def __init__(
        self,
        memory: SenderMemory,
        *,
        me: Introduction,
        checksum: bool,
        declaration: Declaration | None,
        direct: DirectSender | None,
    ) -> None:
        self._memory = memory
        self._me = me
        self._checksum = checksum
        self._declaration = declaration
        self._direct = direct
        self._connections = Connections(memory, me)
        self._stage = "connected"
        self._tensor = ""

    async def send(self, receivers: Sequence[Receiver], weights: Weights) -> None:
        """Connect to `receivers`, send `weights` to its end, and wait until all have it."""
        serving = asyncio.create_task(self._memory.serve())
        try:
            outlets = await self._open(receivers)
            order = DeclaredOrder(self._declaration)
            self._enter("made the weights")
            for name, tensor in weights:
                self._enter("packed", name)
                declared = order.place(name, tensor)
                if declared is not Repeated.ALIAS:
                    await self._put(outlets, declared, name, tensor)
                self._enter("made the weights")
            order.check_complete()
            if self._direct is not None:
                await self._direct.end()
            self._enter("waited for the stream's acceptance")
            for outlet in outlets:
                await outlet.end()
            for outlet in outlets:
                await outlet.await_acceptance()
        except BaseException as error:
            await self._tell(error)
            raise
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        self._connections.close()

    async def _put(
        self,
        outlets: Sequence[Outlet],
        declared: TensorSpec | None,
        name: str,
        tensor: torch.Tensor,
    ) -> None:
        places = None if self._direct is None else self._direct.places_of(name, tensor)
        if self._direct is not None and places is not None:
            if self._direct.has_offered_nothing:
                # The weight version comes first, and with it the receiver's update begins.
                for outlet in outlets:
                    await outlet.flush()
            await self._direct.put(name, tensor, places)
            return
        for outlet in outlets:
            await outlet.put(declared, name, tensor)

    async def _open(self, receivers: Sequence[Receiver]) -> list[Outlet]:
        """Connect to all receivers, and agree with each on what it is sent."""
        await self._connections.open(receivers)
        channels = self._connections.channels
        layouts = [
            await offer_plan(channel, self._declaration, receiver.rank)
            for channel, receiver in zip(channels, receivers, strict=True)
        ]
        buffers = self._memory.buffers
        shares = accepted(share_buffers(layouts, buffers.buffer_bytes, buffers.count))
        outlets = [
            Outlet(
                self._memory,
                share,
                [channels[index] for index in share.receivers],
                self._parts_of(share.layout),
                checksum=self._checksum,
            )
            for share in shares
        ]
        for outlet in outlets:
            await outlet.begin()
        if self._direct is not None:
            await self._direct.open(channels)
        return outlets

    def _parts_of(self, layout: str | None) -> Mapping[str, Sequence[SentPart]] | None:
        if layout is None or self._declaration is None:
            return None
        return self._declaration.parts_of(layout)

    async def _tell(self, error: BaseException) -> None:
        failed = Failed(
            worker=str(self._me.worker),
            stage=self._stage,
            tensor=self._tensor,
            message=f"{type(error).__name__}: {error}",
        )
        await self._connections.tell(told_of(error, failed))

    def _enter(self, stage: str, tensor: str = "") -> None:
        self._stage, self._tensor = stage, tensor
        self._connections.enter(stage, tensor)
