"""The header in front of every payload that rollsync writes to disk or sends.

Rule kept here: a reader learns kind and version from the header alone, and refuses what it does
not know before it looks at the payload. Layout (big-endian, `docs/format.md` section 1):

    offset  bytes  field
         0      8  magic  8f 52 53 59 4e 43 0d 0a
         8     32  kind, ASCII, padded with zero bytes
        40      4  schema version, from 1
        44      8  payload length
        52     16  payload checksum: XXH3-128, seed 0, canonical (big-endian) form
        68      4  header checksum: CRC-32 of the 68 bytes before it
        72         payload
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Final

import xxhash
from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.codecs.errors import (
    ChecksumMismatch,
    DamagedHeader,
    LengthMismatch,
    TooShort,
    WrongMagic,
)

MAGIC: Final = b"\x8fRSYNC\r\n"
"""The first byte is no ASCII and the last two are a line end: a text transfer damages it."""
_FIELDS: Final = struct.Struct(">8s32sIQ16s")
_CRC: Final = struct.Struct(">I")
HEADER_BYTES: Final = _FIELDS.size + _CRC.size
_KIND_NAME: Final = re.compile(r"[a-z][a-z0-9.-]{0,31}")


class Header(Struct, frozen=True, kw_only=True):
    """What an envelope says about its payload."""

    kind: str
    version: int
    payload_bytes: int
    payload_checksum: bytes


def seal(kind: str, version: int, payload: bytes) -> bytes:
    """Puts the header in front of `payload`.

    Raises:
        ValueError: `kind` is no kind name (1 to 32 of a-z, 0-9, dot and dash) or the version is
            not in 1..2^32-1. Both are mistakes of the code, not of data.
    """
    if _KIND_NAME.fullmatch(kind) is None or not 1 <= version < 2**32:
        raise ValueError(f"kind {kind!r} version {version} cannot be written in a header")
    fields = _FIELDS.pack(
        MAGIC, kind.encode("ascii"), version, len(payload), xxhash.xxh3_128_digest(payload)
    )
    return b"".join((fields, _CRC.pack(zlib.crc32(fields)), payload))


def read_header(data: bytes) -> Result[Header, TooShort | WrongMagic | DamagedHeader]:
    """Reads the first `HEADER_BYTES` bytes of `data`; what follows them is not looked at."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        return Failure(WrongMagic(found=data[: len(MAGIC)]))
    if len(data) < HEADER_BYTES:
        return Failure(TooShort(needed_bytes=HEADER_BYTES, found_bytes=len(data)))
    fields = data[: _FIELDS.size]
    (crc,) = _CRC.unpack_from(data, _FIELDS.size)
    if crc != zlib.crc32(fields):
        return Failure(DamagedHeader(why="its checksum does not match"))
    kind_field: bytes
    version: int
    payload_bytes: int
    checksum: bytes
    _, kind_field, version, payload_bytes, checksum = _FIELDS.unpack(fields)
    kind = kind_field.rstrip(b"\0").decode("ascii", errors="replace")
    if _KIND_NAME.fullmatch(kind) is None:
        return Failure(DamagedHeader(why=f"{kind!r} is no kind name"))
    return Success(
        Header(kind=kind, version=version, payload_bytes=payload_bytes, payload_checksum=checksum)
    )


def open_payload(header: Header, data: bytes) -> Result[bytes, LengthMismatch | ChecksumMismatch]:
    """The payload of an envelope whose header has been read and accepted."""
    found_bytes = len(data) - HEADER_BYTES
    if found_bytes != header.payload_bytes:
        return Failure(
            LengthMismatch(
                kind=header.kind, declared_bytes=header.payload_bytes, found_bytes=found_bytes
            )
        )
    payload = data[HEADER_BYTES:]
    checksum = xxhash.xxh3_128_digest(payload)
    if checksum != header.payload_checksum:
        return Failure(
            ChecksumMismatch(kind=header.kind, declared=header.payload_checksum, found=checksum)
        )
    return Success(payload)
