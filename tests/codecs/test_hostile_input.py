"""Whatever bytes come in, a declared error comes out, or a value whose bytes they are.

Two sorts of damage are tried on every kind. Damage *to an envelope* is always noticed. Damage to a
payload that is then *sealed again*, with a right length and checksum, reaches the strict decoder:
it may yield another value, and then the bytes must be exactly those that `encode` writes for it.
"""

from __future__ import annotations

import tracemalloc

import pytest
from returns.pipeline import is_successful
from returns.result import Result

from rollsync.codecs import DecodeError, decode_any, describe, encode
from rollsync.codecs.envelope import HEADER_BYTES, read_header, seal
from rollsync.codecs.errors import NewerVersion, UnknownKind, WrongKind
from rollsync.codecs.registry import KINDS, AnyKind
from tests.codecs.damage import SOME_BYTES, bit_flips, insertions, truncations
from tests.codecs.samples import SAMPLES

DEEP = (b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\x81\xa6groups" + b"\x91" * 100_000)
LONG = tuple(
    code + b"\xff" * length_bytes
    for code, length_bytes in ((b"\xdd", 4), (b"\xdf", 4), (b"\xdb", 4), (b"\xc6", 4), (b"\xdc", 2))
)


def check_refused(result: Result[object, DecodeError]) -> None:
    assert not is_successful(result)
    assert describe(result.failure())


def check_refused_or_canonical(data: bytes) -> None:
    result = decode_any(data)
    if is_successful(result):
        assert encode(result.unwrap()) == data
    else:
        assert describe(result.failure())


def case(kind: AnyKind, name: str) -> bytes:
    return encode(SAMPLES[kind.name][name])


every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@every_kind
def test_every_bit_flip_of_an_envelope_is_refused(kind: AnyKind) -> None:
    for damaged in bit_flips(case(kind, "full")):
        check_refused(decode_any(damaged))


@every_kind
def test_every_truncation_of_an_envelope_is_refused(kind: AnyKind) -> None:
    for damaged in truncations(case(kind, "full")):
        check_refused(decode_any(damaged))


@every_kind
def test_every_insertion_into_an_envelope_is_refused(kind: AnyKind) -> None:
    for damaged in insertions(case(kind, "empty"), tuple(range(256))):
        check_refused(decode_any(damaged))
    for damaged in insertions(case(kind, "full"), SOME_BYTES):
        check_refused(decode_any(damaged))


@every_kind
def test_damaged_payload_sealed_again_is_refused_or_canonical(kind: AnyKind) -> None:
    payload = case(kind, "full")[HEADER_BYTES:]
    for damage in (bit_flips(payload), truncations(payload), insertions(payload, SOME_BYTES)):
        for damaged in damage:
            check_refused_or_canonical(seal(kind.name, kind.newest_version, damaged))


@every_kind
def test_deep_and_endless_payloads_are_refused_and_take_no_memory(kind: AnyKind) -> None:
    payload = case(kind, "full")[HEADER_BYTES:]
    endless = [payload[:place] + long for place in range(0, 80, 3) for long in LONG]
    for damaged in (*DEEP, *LONG, *endless):
        data = seal(kind.name, kind.newest_version, damaged)
        tracemalloc.start()
        result = decode_any(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        check_refused(result)
        assert peak_bytes < 16 * len(data) + 1_000_000


@every_kind
def test_what_is_not_known_is_refused_before_the_payload_is_read(kind: AnyKind) -> None:
    payload = b"not MessagePack at all"
    newer = kind.newest_version + 2
    assert decode_any(seal(kind.name, newer, payload)).failure() == NewerVersion(
        kind=kind.name, version=newer, newest_known=kind.newest_version
    )
    assert decode_any(seal("no.such-kind", 1, payload)).failure() == UnknownKind(
        kind="no.such-kind"
    )
    other = seal("other.kind", 1, payload)
    result = kind.decode_after(read_header(other).unwrap(), other)
    assert result.failure() == WrongKind(expected=kind.name, found="other.kind")
