"""The frames of a stream's control connection, without the connection: bytes in, messages out.

A frame is length (4 bytes, big endian), code (16 bytes, keyed BLAKE2b over the frame's number, the
sender's side and the message), and the message. The key is made from the run's secret and both
ends' nonces, so that no frame of another stream fits.

Rules kept here: a frame's length is checked before anything is kept for it, and its code before
anybody sees what is in it; and a peer that has proved nothing yet has short frames.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, Literal

Side = Literal["sender", "receiver"]
"""An end of a stream."""

NONCE_BYTES: Final = 16
GREETING_LIMIT_BYTES: Final = 4096
"""Longest message of a peer that has proved nothing yet."""
MESSAGE_LIMIT_BYTES: Final = 256 * 1024 * 1024
"""Longest message of an authenticated peer: the announcement of a bucket of very small tensors."""
_CODE_BYTES: Final = 16
_LENGTH: Final = struct.Struct(">I")
_NUMBER: Final = struct.Struct(">Q")
_HEAD_BYTES: Final = _LENGTH.size + _CODE_BYTES


class BrokenFrame(Exception):
    """What came is no frame of the other end of this stream."""


def proof(secret: bytes, side: Side, *nonces: bytes) -> bytes:
    """What shows that `side` knows the secret, for these nonces only."""
    return hmac.new(secret, b"|".join((side.encode(), *nonces)), hashlib.sha256).digest()


class Frames:
    """Those that one end sends and receives.

    Args:
        side: which end this is.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._other: Side = "receiver" if side == "sender" else "sender"
        self._key = b""
        self._sent = 0
        self._opened = 0
        self._limit = GREETING_LIMIT_BYTES
        self._unread = bytearray()

    @property
    def other(self) -> Side:
        """The end that this one talks to."""
        return self._other

    @property
    def is_authenticated(self) -> bool:
        """Whether the other end has proved itself."""
        return bool(self._key)

    def authenticate(self, secret: bytes, *nonces: bytes) -> None:
        """From here on frames carry codes of this stream, and may be long."""
        self._key = hashlib.blake2b(b"|".join(nonces), key=secret, digest_size=32).digest()
        self._limit = MESSAGE_LIMIT_BYTES

    def continue_from(self, earlier: Frames) -> None:
        """Go on where `earlier` was, with what has come over the same connection."""
        self._sent, self._opened = earlier._sent, earlier._opened
        self._unread = earlier._unread

    def seal(self, message: bytes) -> bytes:
        """The next frame to send, with this message."""
        code = self._code(self._side, self._sent, message)
        self._sent += 1
        return _LENGTH.pack(len(message)) + code + message

    def take(self, part: bytes) -> None:
        """Keep what has come."""
        self._unread += part

    def open_next(self) -> bytes | None:
        """The message of the next frame, if all of it has come.

        Raises:
            BrokenFrame: it is too long, or has a wrong code.
        """
        unread = self._unread
        if len(unread) < _HEAD_BYTES:
            return None
        (length,) = _LENGTH.unpack_from(unread)
        if length > self._limit:
            raise BrokenFrame(f"a frame of {length} bytes is too long")
        end = _HEAD_BYTES + length
        if len(unread) < end:
            return None
        code, message = bytes(unread[_LENGTH.size : _HEAD_BYTES]), bytes(unread[_HEAD_BYTES:end])
        del unread[:end]
        if not hmac.compare_digest(code, self._code(self._other, self._opened, message)):
            raise BrokenFrame("a frame with a wrong code")
        self._opened += 1
        return message

    def _code(self, side: Side, number: int, message: bytes) -> bytes:
        keyed = hashlib.blake2b(key=self._key, digest_size=_CODE_BYTES)
        keyed.update(side.encode())
        keyed.update(_NUMBER.pack(number))
        keyed.update(message)
        return keyed.digest()
