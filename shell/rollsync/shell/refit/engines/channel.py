"""One end of a stream's control connection: whole, authenticated messages over a socket.

Each message is an envelope of kind `refit.control` in a frame of `frames`.

Rules kept here: every wait for an answer that the other end owes has a deadline; and an ended
connection is noticed at once.
What an admitted peer says is looked for without a pause for a moment before it is waited for:
waking a sleeping process takes longer than most answers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from returns.pipeline import is_successful

from rollsync.codecs import describe
from rollsync.codecs.refit.control import CONTROL_MESSAGE
from rollsync.pure.refit.control import ControlBody, ControlMessage, Failed
from rollsync.shell.refit.engines.errors import (
    PeerFailed,
    PeerLost,
    PeerRefused,
    TransferError,
    TransferTimeout,
)
from rollsync.shell.refit.engines.frames import BrokenFrame, Frames, Side

FAREWELL_S: Final = 1.0
"""How long telling the other end of a failure may take: it may be the one that is stuck."""
_READ_BYTES: Final = 1 << 16
_SPIN_S: Final = 0.001
"""How long a peer's answer is looked for without giving the event loop back."""
_Error = TypeVar("_Error", bound=TransferError)


class ControlChannel:
    """Sends and receives control messages.

    Args:
        connection: a connected, non-blocking stream socket.
        side: which end this is.
        worker: this worker in words, for errors.
        peer: the other worker in words, for errors.
        timeout_s: how long one wait may take.
        on_host: whether the route goes through the host's memory, as `choose_engine` has it; if
            not, over the network.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        side: Side,
        worker: str,
        peer: str,
        timeout_s: float,
        on_host: bool,
    ) -> None:
        self.connection = connection
        self.peer = peer
        self.worker = worker
        self.timeout_s = timeout_s
        self.on_host = on_host
        self._frames = Frames(side)
        self._kind_aside: type[ControlBody] | None = None
        self._aside: deque[tuple[ControlBody, bytes]] = deque()
        self._others: deque[tuple[ControlBody, bytes]] = deque()
        self._expects = True
        self._deadline: asyncio.Timeout | None = None
        self._interruption: Exception | None = None
        self._ready: asyncio.Future[None] | None = None
        self._between_looks: Callable[[], object] | None = os.sched_yield
        self._stage = "connected"
        self._tensor = ""

    @property
    def stage(self) -> str:
        """What this end does now."""
        return self._stage

    @property
    def tensor(self) -> str:
        """The tensor that it is at; empty when at none."""
        return self._tensor

    def enter(self, stage: str, tensor: str = "") -> None:
        """What this end does from here on, for errors."""
        self._stage, self._tensor = stage, tensor

    def between_looks(self, do: Callable[[], object] | None) -> None:
        """What is done from here on between two looks for an answer; None: an answer is not looked
        for, but waited for at once."""
        self._between_looks = do

    def authenticate(self, secret: bytes, *nonces: bytes) -> None:
        """The other end has proved itself; from here on messages carry codes of this stream."""
        self._frames.authenticate(secret, *nonces)

    def continue_from(self, earlier: ControlChannel) -> None:
        """Go on where `earlier` was, over the same connection."""
        self._frames.continue_from(earlier._frames)

    def expect(self, expects: bool) -> None:
        """Whether the other end owes an answer from now on; if not, it may take any time."""
        before, self._expects = self._expects, expects
        if self._deadline is not None and before != expects and not self._deadline.expired():
            end = asyncio.get_running_loop().time() + self.timeout_s
            self._deadline.reschedule(end if expects else None)

    def interrupt(self, error: Exception) -> None:
        """Let whoever waits for the other end, now or later, fail with `error`: the stream has
        failed elsewhere. What is sent still gets there."""
        self._interruption = self._interruption or error
        self._note_readable()

    async def send(self, body: ControlBody) -> bytes:
        """Send one message; the bytes of the message."""
        message = CONTROL_MESSAGE.encode(ControlMessage(body=body))
        frame = self._frames.seal(message)
        try:
            taken = self._send_now(frame)
            if taken < len(frame):
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(self.timeout_s):
                    await loop.sock_sendall(self.connection, memoryview(frame)[taken:])
        except TimeoutError as error:
            raise self._timeout(f"the {self._frames.other} took no message") from error
        except OSError as error:
            # What the other end said before it went is worth more than that it went.
            await self._last_words()
            raise self.lost() from error
        return message

    async def bid_farewell(self, failed: Failed) -> None:
        """Tell the other end of a failure, as far as it listens, and end the connection.

        Closing a socket that has something unread takes back what was sent last, so the rest is
        read and thrown away, beside whatever this process goes on with.
        """
        # The other end may be what failed: then there is nobody to tell.
        with contextlib.suppress(TransferError, OSError):
            async with asyncio.timeout(FAREWELL_S):
                await self.send(failed)
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(self.timeout_s)
            threading.Thread(target=_drain, args=(self.connection,), daemon=True).start()
            return
        self.close()

    def set_aside(self, kind: type[ControlBody]) -> None:
        """From here on `receive` leaves messages of this kind to `receive_aside`."""
        self._kind_aside = kind

    async def receive(self) -> tuple[ControlBody, bytes]:
        """The next message and its bytes.

        Raises:
            PeerFailed: the other end gave up; its reason is in the error.
            PeerLost: the connection ended.
            PeerRefused: the frame is too long, has a wrong code, or is no control message.
            TransferTimeout: nothing came in time.
        """
        while not self._others:
            self._sort(await self._next())
        return self._others.popleft()

    def take_in(self) -> None:
        """Keep what has come for `receive`, so that the other end is not stuck with sending it, and
        what it has said last, or that it is gone, is heard now.

        Raises:
            PeerFailed, PeerLost, PeerRefused: see `receive`.
        """
        while (message := self._arrived()) is not None:
            self._sort(message)

    async def receive_aside(self) -> ControlBody:
        """The next message of the kind that is set aside; it raises what `receive` does."""
        while not self._aside:
            self._sort(await self._next())
        return self._aside.popleft()[0]

    def _sort(self, message: tuple[ControlBody, bytes]) -> None:
        kind = self._kind_aside
        is_aside = kind is not None and isinstance(message[0], kind)
        (self._aside if is_aside else self._others).append(message)

    async def _next(self) -> tuple[ControlBody, bytes]:
        if self._interruption is not None:
            raise self._interruption
        try:
            message = self._opened()
            if message is None:
                message = self._look()
            if message is None:
                message = await self._waited_for()
        except TimeoutError as error:
            raise self._timeout(f"{self.peer} said nothing") from error
        except OSError as error:
            raise self.lost() from error
        return self._decoded(message)

    def receive_now(self) -> tuple[ControlBody, bytes] | None:
        """What `receive` gives, if it has come already.

        Raises:
            PeerFailed, PeerLost, PeerRefused: see `receive`.
        """
        while not self._others and (message := self._arrived()) is not None:
            self._sort(message)
        return self._others.popleft() if self._others else None

    def _arrived(self) -> tuple[ControlBody, bytes] | None:
        """The next message of any kind, if it has come already."""
        if self._interruption is not None:
            raise self._interruption
        try:
            message = self._opened()
            if message is None and self._read_now():
                message = self._opened()
        except OSError as error:
            raise self.lost() from error
        return None if message is None else self._decoded(message)

    def _decoded(self, message: bytes) -> tuple[ControlBody, bytes]:
        """What the bytes of a message say."""
        decoded = CONTROL_MESSAGE.decode(message)
        if not is_successful(decoded):
            raise self.refused(describe(decoded.failure()))
        body = decoded.unwrap().body
        if isinstance(body, Failed):
            raise PeerFailed.heard(body, worker=self.worker, stage=self.stage)
        return body, message

    def unexpected(self, body: ControlBody) -> PeerRefused:
        """The error for a message that has no place here."""
        return self.refused(f"an unexpected message, {type(body).__name__}")

    def close(self) -> None:
        """End the connection."""
        self.connection.close()

    async def _last_words(self) -> None:
        """Raise `PeerFailed` if the other end has said why it went."""
        if self._deadline is not None or self._interruption is not None:
            # Whoever waits for it elsewhere hears that, or has heard of something before.
            return
        with contextlib.suppress(PeerLost, PeerRefused):
            async with asyncio.timeout(FAREWELL_S):
                while True:
                    await self.receive()

    def _send_now(self, frame: bytes) -> int:
        """How much of a frame could be sent without waiting."""
        try:
            return self.connection.send(frame)
        except BlockingIOError:
            return 0

    def _look(self) -> bytes | None:
        """The next message, if it comes soon. A stranger is not worth the event loop's time."""
        between = self._between_looks
        if not self._frames.is_authenticated or between is None:
            return None
        end = time.monotonic() + _SPIN_S
        while True:
            if self._read_now() and (message := self._opened()) is not None:
                return message
            if time.monotonic() > end:
                return None
            between()

    async def _waited_for(self) -> bytes:
        try:
            async with asyncio.timeout(self.timeout_s if self._expects else None) as deadline:
                self._deadline = deadline
                while (message := self._opened()) is None:
                    if not self._read_now():
                        await self._readable()
                return message
        except TimeoutError:
            # What came while this process was busy is not late.
            while (message := self._opened()) is None:
                if not self._read_now():
                    raise
            return message
        finally:
            self._deadline = None

    async def _readable(self) -> None:
        """Wait until something has come, or the connection has ended; nothing is taken."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self.connection, self._note_readable)
        try:
            await self._ready
        finally:
            self._ready = None
            loop.remove_reader(self.connection)
        if self._interruption is not None:
            raise ConnectionAbortedError

    def _note_readable(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _read_now(self) -> bool:
        """Take what has come; whether anything has."""
        try:
            part = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        if not part:
            raise ConnectionResetError
        self._frames.take(part)
        return True

    def _opened(self) -> bytes | None:
        """The next message, if all of it has been read."""
        try:
            return self._frames.open_next()
        except BrokenFrame as broken:
            raise self.refused(str(broken)) from broken

    def _timeout(self, what: str) -> TransferTimeout:
        error = self.error(
            TransferTimeout,
            f"{what} for {self.timeout_s:g} s",
            remedy="see the other worker's log; raise refit_timeout_s if it is only slow",
        )
        error.waited_for = self.peer
        return error

    def lost(self) -> Exception:
        """The error for a connection that ended."""
        return self._interruption or self.error(
            PeerLost, f"{self.peer} is gone", remedy="see that worker's log for why it ended"
        )

    def refused(self, why: str) -> PeerRefused:
        """The error for what no end of a stream sends."""
        return self.error(
            PeerRefused,
            f"{self.peer} sent {why}",
            remedy="make sure that both ends are of one run and one version of rollsync",
        )

    def error(self, kind: type[_Error], message: str, *, remedy: str) -> _Error:
        """An error at what this end is doing."""
        return kind(
            message, worker=self.worker, stage=self.stage, tensor=self.tensor, remedy=remedy
        )


def _drain(connection: socket.socket) -> None:
    """Read until the other end closes, for as long as a wait may take; then close."""
    with contextlib.suppress(OSError), connection:
        while connection.recv(1 << 16):
            pass
