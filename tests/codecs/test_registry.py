"""Finding the kind of a value and of bytes, and reading what was written."""

from __future__ import annotations

from hashlib import sha256
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from msgspec import Struct
from returns.result import Result, Success

from rollsync.codecs import DecodeError, decode, decode_any, encode, kind_named, payload_digest
from rollsync.codecs.canonical import Natural, Wire
from rollsync.codecs.envelope import HEADER_BYTES, seal
from rollsync.codecs.errors import (
    BrokenRule,
    MalformedPayload,
    NewerVersion,
    NoSuchVersion,
    NotCanonical,
    WrongKind,
    WrongMagic,
)
from rollsync.codecs.kind import Kind, first, kind
from rollsync.codecs.registry import KINDS
from rollsync.codecs.rollout.recovery_ledger import RECOVERY_LEDGER
from rollsync.codecs.rollout.replay_metadata import REPLAY_METADATA
from rollsync.codecs.rollout.state import ROLLOUT_STATE
from rollsync.codecs.rollout.state_diff import STATE_DIFF
from rollsync.pure.rollout.diff import diff, patch
from rollsync.pure.rollout.state import RolloutRecoveryLedger, RolloutState
from tests.codecs.samples import SAMPLES
from tests.codecs.samples.replay_metadata import FULL as FULL_REPLAY
from tests.codecs.strategies import ledgers, states

LEDGER = SAMPLES["rollout.recovery-ledger"]["full"]


def test_kind_may_be_named_by_itself_or_by_its_type() -> None:
    data = encode(LEDGER)
    by_kind: Result[RolloutRecoveryLedger, DecodeError] = decode(data, RECOVERY_LEDGER)
    by_type: Result[RolloutRecoveryLedger, DecodeError] = decode(data, RolloutRecoveryLedger)
    assert by_kind == by_type == decode_any(data) == Success(LEDGER)


def test_another_kind_than_asked_for_is_an_error() -> None:
    expected = WrongKind(expected="rollout.state", found="rollout.recovery-ledger")
    assert decode(encode(LEDGER), ROLLOUT_STATE).failure() == expected
    assert decode(encode(LEDGER), RolloutState).failure() == expected
    assert decode(b"not ours", RolloutState).failure() == WrongMagic(found=b"not ours")


def test_type_without_a_codec_is_a_mistake_of_the_code() -> None:
    with pytest.raises(TypeError, match="no codec for int"):
        encode(3)
    with pytest.raises(TypeError, match="no codec for int"):
        decode(encode(LEDGER), int)
    with pytest.raises(TypeError, match="does not write int"):
        RECOVERY_LEDGER.encode_object(3)


def test_names_and_types_of_kinds_are_unique() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert len({kind.domain for kind in KINDS}) == len(KINDS)
    assert kind_named("rollout.state") is ROLLOUT_STATE
    assert kind_named("no.such-kind") is None


@given(ledgers)
@settings(max_examples=50, deadline=None)
def test_every_ledger_comes_back(ledger: RolloutRecoveryLedger) -> None:
    assert decode(encode(ledger), RECOVERY_LEDGER) == Success(ledger)


@given(states)
@settings(max_examples=100, deadline=None)
def test_every_state_comes_back(state: RolloutState) -> None:
    data = encode(state)
    again = decode(data, ROLLOUT_STATE).unwrap()
    assert again == state
    assert diff(again, state).is_empty
    assert encode(again) == data


@given(states, states)
@settings(max_examples=50, deadline=None)
def test_every_difference_comes_back_and_leads_to_the_same_state(
    a: RolloutState, b: RolloutState
) -> None:
    change = decode(encode(diff(a, b)), STATE_DIFF).unwrap()
    assert change == diff(a, b)
    assert encode(patch(a, change)) == encode(b)


class Person(Struct, frozen=True):
    """A domain value whose wire form has a history."""

    full_name: str
    age: int


class PersonV1(Wire, frozen=True, kw_only=True):
    name: str


class PersonV2(Wire, frozen=True, kw_only=True):
    full_name: str


class PersonV3(Wire, frozen=True, kw_only=True):
    full_name: str
    age: Natural


def from_wire(wire: PersonV3) -> Result[Person, str]:
    if wire.age > 150:
        return Result.from_failure("nobody is that old")
    return Result.from_value(Person(full_name=wire.full_name, age=wire.age))


PERSON: Kind[Person] = kind(
    "test.person",
    domain=Person,
    history=first(PersonV1)
    .then(PersonV2, lambda v1: PersonV2(full_name=v1.name))
    .then(PersonV3, lambda v2: PersonV3(full_name=v2.full_name, age=0)),
    to_wire=lambda person: PersonV3(full_name=person.full_name, age=person.age),
    from_wire=from_wire,
)


def sealed(version: int, payload: object) -> bytes:
    return seal("test.person", version, msgspec.msgpack.encode(payload))


def test_every_version_is_read_as_the_newest() -> None:
    ada = Person(full_name="Ada", age=0)
    assert PERSON.decode(sealed(1, {"name": "Ada"})) == Success(ada)
    assert PERSON.decode(sealed(2, {"full_name": "Ada"})) == Success(ada)
    assert PERSON.decode(sealed(3, {"full_name": "Ada", "age": 0})) == Success(ada)
    assert PERSON.encode(ada) == sealed(3, {"full_name": "Ada", "age": 0})


def test_each_version_is_read_by_its_own_schema() -> None:
    for version, payload in ((2, {"name": "Ada"}), (1, {"full_name": "Ada"}), (3, {"age": 0})):
        failure = PERSON.decode(sealed(version, payload)).failure()
        assert isinstance(failure, MalformedPayload)
        assert failure.version == version


def test_versions_that_are_not_known_are_refused_by_number() -> None:
    payload = {"full_name": "Ada", "age": 0}
    assert PERSON.decode(sealed(4, payload)).failure() == NewerVersion(
        kind="test.person", version=4, newest_known=3
    )
    data = sealed(1, payload)
    fields = data[:40] + bytes(4) + data[44:68]
    version_zero = fields + crc32(fields).to_bytes(4, "big") + data[HEADER_BYTES:]
    assert PERSON.decode(version_zero).failure() == NoSuchVersion(kind="test.person", version=0)


def test_old_versions_have_to_be_canonical_too() -> None:
    long_string = seal("test.person", 1, b"\x81\xa4name\xd9\x03Ada")
    assert isinstance(PERSON.decode(long_string).failure(), NotCanonical)


def test_rule_of_the_domain_is_named() -> None:
    failure = PERSON.decode(sealed(3, {"full_name": "Ada", "age": 151})).failure()
    assert failure == BrokenRule(kind="test.person", version=3, rule="nobody is that old")


def test_replay_metadata_with_a_digest_of_other_groups_is_neither_written_nor_read() -> None:
    wrong = msgspec.structs.replace(FULL_REPLAY, groups=FULL_REPLAY.groups[:1])
    with pytest.raises(ValueError, match="manifest_digest"):
        encode(wrong)
    payload = msgspec.msgpack.encode(wrong)
    failure = REPLAY_METADATA.decode(seal(REPLAY_METADATA.name, 1, payload)).failure()
    assert failure == BrokenRule(
        kind=REPLAY_METADATA.name, version=1, rule="manifest_digest is the digest of groups"
    )


def test_payload_digest_is_that_of_the_payload() -> None:
    assert payload_digest(LEDGER) == sha256(encode(LEDGER)[HEADER_BYTES:]).hexdigest()
