"""Equal values are equal bytes, and other bytes for the same value are refused."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import FieldInfo, fields

from rollsync.codecs.canonical import (
    Finite,
    Sha256Hex,
    Wire,
    encode_canonical,
    strictly_increasing,
    why_not_canonical,
)
from rollsync.codecs.registry import KINDS, AnyKind

ROOT = Path(__file__).resolve().parents[2]


class Numbers(Wire, frozen=True, kw_only=True):
    """A wire struct with a float wherever one can be."""

    one: Finite
    many: tuple[Finite, ...]
    named: dict[str, Finite]
    text: str
    raw: bytes = b""


DECODER = msgspec.msgpack.Decoder(Numbers)


def numbers(value: float, text: str = "") -> Numbers:
    return Numbers(one=value, many=(1.0, value), named={"b": value, "a": 2.0}, text=text)


def test_negative_zero_is_written_as_zero_everywhere() -> None:
    payload = encode_canonical(numbers(-0.0), DECODER)
    assert payload == encode_canonical(numbers(0.0), DECODER)
    assert math.copysign(1.0, DECODER.decode(payload).many[1]) == 1.0


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_written(value: float) -> None:
    with pytest.raises(ValueError, match="Expected `float`"):
        encode_canonical(numbers(value), DECODER)


def test_text_and_bytes_that_look_like_a_special_float_are_left_alone() -> None:
    looks = "\u02c0" + "\0" * 7
    value = Numbers(one=1.0, many=(), named={}, text=looks, raw=b"\xcb\x80" + b"\0" * 7)
    payload = encode_canonical(value, DECODER)
    assert DECODER.decode(payload) == value
    assert why_not_canonical(value, payload) is None


def test_negative_zero_is_refused() -> None:
    payload = msgspec.msgpack.Encoder(order="deterministic").encode(numbers(-0.0))
    why = why_not_canonical(DECODER.decode(payload), payload)
    assert why is not None
    assert "negative zero" in why


@pytest.mark.parametrize(
    ("canonical", "other"),
    [
        (b"\xa4text\xa0", b"\xa4text\xd9\x00"),
        (b"\xa4many\x90", b"\xa4many\xdc\x00\x00"),
        (b"\xa5named\x80", b"\xa5named\xde\x00\x00"),
        (b"\xa3raw\xc4\x00", b""),
        (b"\x85", b"\xde\x00\x05"),
        (b"\xa3one\xcb\x3f\xf0\0\0\0\0\0\0", b"\xa3one\xca\x3f\x80\0\0"),
        (b"\xa3one\xcb\x3f\xf0\0\0\0\0\0\0", b"\xa3one\x01"),
        (b"\xa4text\xa0\xa3raw\xc4\x00", b"\xa3raw\xc4\x00\xa4text\xa0"),
    ],
    ids=["string", "array", "map", "default", "record", "float32", "integer", "order"],
)
def test_other_bytes_for_the_same_value_are_refused(canonical: bytes, other: bytes) -> None:
    payload = encode_canonical(Numbers(one=1.0, many=(), named={}, text=""), DECODER)
    assert payload.count(canonical) >= 1
    changed = payload.replace(canonical, other, 1)
    if canonical == b"\xa3raw\xc4\x00":
        changed = b"\x84" + changed[1:]
    value = DECODER.decode(changed)
    assert value == DECODER.decode(payload)
    assert why_not_canonical(value, changed) is not None


def test_keys_are_in_order_only_when_none_comes_twice() -> None:
    assert strictly_increasing([])
    assert strictly_increasing(["", "a", "b", "é", "\uffff", "\U00010000"])
    assert not strictly_increasing(["a", "a"])
    assert not strictly_increasing([2, 1])


def test_digest_field_takes_64_lower_case_digits_and_nothing_else() -> None:
    assert msgspec.convert("0f" * 32, Sha256Hex) == "0f" * 32
    for wrong in ("0f" * 31, "0f" * 33, "0F" * 32, "0f" * 31 + "0\n", "0f" * 32 + "\n"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Sha256Hex)


def wires_of(kind: AnyKind) -> set[type[msgspec.Struct]]:
    """The wire structs of a kind, and all structs inside them."""
    found: set[type[msgspec.Struct]] = set()

    def visit(node: msgspec.inspect.Type) -> None:
        match node:
            case msgspec.inspect.StructType():
                if node.cls not in found:
                    found.add(node.cls)
                    for field in node.fields:
                        visit(field.type)
            case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
                visit(node.item_type)
            case msgspec.inspect.TupleType():
                for item in node.item_types:
                    visit(item)
            case msgspec.inspect.UnionType():
                for choice in node.types:
                    visit(choice)
            case msgspec.inspect.DictType():
                visit(node.value_type)
                assert isinstance(node.key_type, msgspec.inspect.StrType)
            case _:
                # No set, no Any, no enumeration of the domain, no custom type.
                assert isinstance(
                    node,
                    msgspec.inspect.NoneType
                    | msgspec.inspect.BoolType
                    | msgspec.inspect.IntType
                    | msgspec.inspect.FloatType
                    | msgspec.inspect.StrType
                    | msgspec.inspect.BytesType
                    | msgspec.inspect.LiteralType,
                ), f"{kind.name}: {node} is no wire type"

    for wire in kind.wires:
        visit(msgspec.inspect.type_info(wire))
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_wire_structs_are_strict_and_made_of_wire_types(kind: AnyKind) -> None:
    for wire in wires_of(kind):
        assert issubclass(wire, Wire)
        config = wire.__struct_config__
        assert config.frozen
        assert config.forbid_unknown_fields
        defaults: list[FieldInfo] = [field for field in fields(wire) if not field.required]
        assert not defaults, f"{wire} has defaults"
        for field in fields(wire):
            assert bounded(msgspec.inspect.type_info(field.type)), f"{wire}.{field.name}"


def bounded(node: msgspec.inspect.Type) -> bool:
    """Whether every number in a field's type has bounds: no NaN, nothing beyond 64 bits."""
    match node:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return node.ge is not None and node.le is not None
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return bounded(node.item_type)
        case msgspec.inspect.TupleType():
            return all(bounded(item) for item in node.item_types)
        case msgspec.inspect.UnionType():
            return all(bounded(choice) for choice in node.types)
        case msgspec.inspect.DictType():
            return bounded(node.value_type)
        case _:
            return True


def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import hashlib\n"
        "from rollsync.codecs import encode\n"
        "from tests.codecs.samples import SAMPLES\n"
        "data = b''.join(encode(value) for cases in SAMPLES.values() for value in cases.values())\n"
        "print(hashlib.sha256(data).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(digests) == 1
