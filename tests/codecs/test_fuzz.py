"""Random bytes, and random changes of real values: the oracle is the reader of the document.

Each input is decoded by rollsync and by the independent reader. They have to agree whether it is
legal, rollsync may raise nothing, and what it accepts it has to write back byte for byte.
`ROLLSYNC_FUZZ_EXAMPLES=100000 pytest tests/codecs/test_fuzz.py` goes on for longer.
"""

from __future__ import annotations

import os

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from returns.pipeline import is_successful

from rollsync.codecs import decode_any, describe, encode
from rollsync.codecs.envelope import HEADER_BYTES, MAGIC, seal
from rollsync.codecs.registry import KINDS, AnyKind
from tests.codecs.independent_reader import DOCUMENT, Refused, read, read_document
from tests.codecs.samples import SAMPLES

EXAMPLES = int(os.environ.get("ROLLSYNC_FUZZ_EXAMPLES", "150"))
TABLES = read_document(DOCUMENT.read_text("utf-8"))
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

kinds = st.sampled_from(KINDS)
samples = st.sampled_from(
    [
        (kind, msgspec.msgpack.decode(encode(value)[HEADER_BYTES:]))
        for kind in KINDS
        for value in SAMPLES[kind.name].values()
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=5)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner)
    ),
    max_leaves=12,
)


def check(data: bytes) -> None:
    result = decode_any(data)
    try:
        read(data, TABLES)
    except Refused:
        assert not is_successful(result)
        assert describe(result.failure())
    else:
        assert encode(result.unwrap()) == data


def changed(draw: st.DrawFn, value: object) -> object:
    """`value` with one part replaced, dropped, repeated or swapped, somewhere inside."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(list(value)))
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        what = draw(st.sampled_from(["inside", "drop", "repeat", "swap"]))
        before, item, after = value[:place], value[place], value[place + 1 :]
        match what:
            case "inside":
                return [*before, changed(draw, item), *after]
            case "drop":
                return before + after
            case "repeat":
                return [*before, item, item, *after]
            case _:
                return [*after, item, *before]
    return draw(trees)


@st.composite
def changed_samples(draw: st.DrawFn) -> tuple[AnyKind, object]:
    kind, value = draw(samples)
    for _ in range(draw(st.integers(0, 2))):
        value = changed(draw, value)
    return kind, value


@FUZZ
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(data: bytes, with_magic: bool) -> None:
    check(MAGIC + data if with_magic else data)


@FUZZ
@given(kinds, st.integers(1, 4), st.binary(max_size=200))
def test_random_payloads(kind: AnyKind, version: int, payload: bytes) -> None:
    check(seal(kind.name, version, payload))


@FUZZ
@given(kinds, trees)
def test_random_values(kind: AnyKind, value: object) -> None:
    check(seal(kind.name, kind.newest_version, msgspec.msgpack.encode(value)))


@FUZZ
@given(changed_samples())
def test_changed_values(sample: tuple[AnyKind, object]) -> None:
    kind, value = sample
    check(seal(kind.name, kind.newest_version, msgspec.msgpack.encode(value)))
