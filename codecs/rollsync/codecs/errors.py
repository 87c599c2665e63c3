"""What can be wrong with bytes that somebody hands to rollsync.

Rule kept here: whatever the bytes are, decoding them ends in a value or in one of these structs,
never in another exception. `describe` words each of them for a person.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct


class TooShort(Struct, frozen=True, kw_only=True, tag=True):
    """Fewer bytes than a header has."""

    needed_bytes: int
    found_bytes: int


class WrongMagic(Struct, frozen=True, kw_only=True, tag=True):
    """The bytes do not begin as every rollsync file and message does."""

    found: bytes


class DamagedHeader(Struct, frozen=True, kw_only=True, tag=True):
    """The header does not agree with its own checksum, or its fields are not well formed."""

    why: str


class UnknownKind(Struct, frozen=True, kw_only=True, tag=True):
    """This rollsync has no codec of that name."""

    kind: str


class WrongKind(Struct, frozen=True, kw_only=True, tag=True):
    """The bytes hold another kind than the caller asked for."""

    expected: str
    found: str


class NewerVersion(Struct, frozen=True, kw_only=True, tag=True):
    """The bytes were written by a newer rollsync."""

    kind: str
    version: int
    newest_known: int


class NoSuchVersion(Struct, frozen=True, kw_only=True, tag=True):
    """A version number that no release of rollsync has written."""

    kind: str
    version: int


class LengthMismatch(Struct, frozen=True, kw_only=True, tag=True):
    """The payload is cut off, or bytes follow it."""

    kind: str
    declared_bytes: int
    found_bytes: int


class ChecksumMismatch(Struct, frozen=True, kw_only=True, tag=True):
    """The payload is not the one that was written."""

    kind: str
    declared: bytes
    found: bytes


class MalformedPayload(Struct, frozen=True, kw_only=True, tag=True):
    """The payload is not MessagePack, or not of this kind's schema."""

    kind: str
    version: int
    why: str


class NotCanonical(Struct, frozen=True, kw_only=True, tag=True):
    """The payload says a value in other bytes than `encode` would."""

    kind: str
    version: int
    why: str


class BrokenRule(Struct, frozen=True, kw_only=True, tag=True):
    """The payload fits the schema, yet no legal value is written so (for instance, unsorted)."""

    kind: str
    version: int
    rule: str


EnvelopeError = TooShort | WrongMagic | DamagedHeader | LengthMismatch | ChecksumMismatch
PayloadError = MalformedPayload | NotCanonical | BrokenRule
DecodeError = EnvelopeError | UnknownKind | WrongKind | NewerVersion | NoSuchVersion | PayloadError


def describe(error: DecodeError) -> str:
    """One sentence for a person: what is wrong and, where there is one, the way out."""
    match error:
        case TooShort():
            return (
                f"{error.found_bytes} bytes are too few: a header alone has "
                f"{error.needed_bytes}; the file is cut off or not rollsync's"
            )
        case WrongMagic():
            return f"not a rollsync file: it begins with {error.found.hex()}"
        case DamagedHeader():
            return f"the header is damaged: {error.why}"
        case UnknownKind():
            return f"unknown kind {error.kind!r}: written by a newer rollsync, or a plug-in"
        case WrongKind():
            return f"expected kind {error.expected}, found kind {error.found}"
        case NewerVersion():
            return (
                f"written by a newer rollsync: kind {error.kind} version {error.version}, "
                f"this one reads up to {error.newest_known}; upgrade rollsync to read it"
            )
        case _:
            return _describe_damage(error)


def _describe_damage(
    error: NoSuchVersion | LengthMismatch | ChecksumMismatch | PayloadError,
) -> str:
    match error:
        case NoSuchVersion():
            return f"kind {error.kind} has no version {error.version}"
        case LengthMismatch():
            return (
                f"the payload of kind {error.kind} should have {error.declared_bytes} bytes "
                f"and has {error.found_bytes}"
            )
        case ChecksumMismatch():
            return (
                f"the payload of kind {error.kind} is damaged: checksum "
                f"{error.found.hex()}, written with {error.declared.hex()}"
            )
        case MalformedPayload():
            return f"kind {error.kind} version {error.version} is malformed: {error.why}"
        case NotCanonical():
            return f"kind {error.kind} version {error.version} is not canonical: {error.why}"
        case BrokenRule():
            return f"kind {error.kind} version {error.version} breaks a rule: {error.rule}"
        case _:
            assert_never(error)
