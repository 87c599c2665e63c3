"""The header: what it says, and what is refused before the payload is looked at."""

from __future__ import annotations

import struct
import zlib

import pytest

from rollsync.codecs.envelope import HEADER_BYTES, MAGIC, open_payload, read_header, seal
from rollsync.codecs.errors import (
    ChecksumMismatch,
    DamagedHeader,
    LengthMismatch,
    TooShort,
    WrongMagic,
)

SEALED = seal("some.kind", 3, b"payload")


def with_header(kind_field: bytes) -> bytes:
    """A header with a right checksum around a kind field that `seal` would not write."""
    fields = struct.pack(">8s32sIQ16s", MAGIC, kind_field, 1, 0, b"")
    return fields + struct.pack(">I", zlib.crc32(fields))


def test_header_is_read_without_the_payload() -> None:
    header = read_header(SEALED[:HEADER_BYTES]).unwrap()
    assert (header.kind, header.version, header.payload_bytes) == ("some.kind", 3, 7)
    assert open_payload(header, SEALED).unwrap() == b"payload"


@pytest.mark.parametrize("length", [0, 1, 8, HEADER_BYTES - 1])
def test_beginning_of_a_header_is_too_short(length: int) -> None:
    assert read_header(SEALED[:length]).failure() == TooShort(
        needed_bytes=HEADER_BYTES, found_bytes=length
    )


@pytest.mark.parametrize("data", [b"{", b"PK\x03\x04 a zip file", MAGIC.replace(b"\r\n", b"\n")])
def test_other_files_are_recognized_as_such(data: bytes) -> None:
    assert read_header(data).failure() == WrongMagic(found=data[:8])


@pytest.mark.parametrize(
    "kind_field", [b"", b"Upper", b"a" * 3 + b"\0" + b"b", b"\xff", b"a/b", b".dot"]
)
def test_header_with_a_name_that_no_kind_has_is_damaged(kind_field: bytes) -> None:
    assert isinstance(read_header(with_header(kind_field)).failure(), DamagedHeader)


def test_longest_kind_name_fits() -> None:
    assert read_header(seal("k" * 32, 2**32 - 1, b"")).unwrap().kind == "k" * 32


@pytest.mark.parametrize(
    ("kind", "version"), [("", 1), ("k" * 33, 1), ("Kind", 1), ("kind", 0), ("kind", 2**32)]
)
def test_what_a_header_cannot_say_is_not_sealed(kind: str, version: int) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        seal(kind, version, b"")


def test_length_is_checked_before_the_checksum() -> None:
    header = read_header(SEALED).unwrap()
    assert open_payload(header, SEALED[:-1]).failure() == LengthMismatch(
        kind="some.kind", declared_bytes=7, found_bytes=6
    )
    assert open_payload(header, SEALED + b"x").failure() == LengthMismatch(
        kind="some.kind", declared_bytes=7, found_bytes=8
    )
    changed = open_payload(header, SEALED[:-1] + b"x").failure()
    assert isinstance(changed, ChecksumMismatch)
    assert changed.declared == header.payload_checksum != changed.found
