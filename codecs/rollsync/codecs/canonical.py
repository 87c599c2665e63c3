"""Canonical MessagePack: equal values are equal bytes, on every machine and under every hash seed.

Rules kept here (`docs/format.md` section 2): struct fields in the order of the schema, maps of
strings in key order, integers and lengths in their shortest form, floats as 64 bits and never
`-0.0`; what is a set or a map of something else goes on the wire as a sorted array without
repetition, which `strictly_increasing` checks. A decoder re-encodes what it read and compares, and
so refuses also what MessagePack readers forgive (repeated keys, long integers, missing defaults).
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""An integer that counts, from 0."""
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A signed integer of 64 bits."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A float that is neither infinite nor NaN."""
Sha256Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
"""A SHA-256 digest in lower-case hexadecimal."""

_NEGATIVE_ZERO: Final = re.compile(rb"\xcb\x80\0{7}")
_PERHAPS_SPECIAL: Final = re.compile(rb"\xcb(?:\x80\0{7}|[\x7f\xff][\xf0-\xff])")
"""Finds each negative zero, infinity and NaN, and very rarely bytes that only look like one (a
part of a long integer). A search costs a tenth of the encoding, a walk through the values many
times as much: it is done only when the search finds something."""
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")

W = TypeVar("W", bound="Wire")
Key = TypeVar("Key", str, int, tuple[str, int])


class Wire(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    gc=False,
    repr_omit_defaults=False,
):
    """Base of every wire struct. Wire values hold no cycles, so the collector may ignore them."""


def encode_canonical(value: object, decoder: msgspec.msgpack.Decoder[W]) -> bytes:
    """The canonical payload of `value`, which is a wire struct or has the same shape.

    Args:
        value: What to write.
        decoder: Decoder of the wire struct. It is used only when the payload may hold a float
            that needs attention, which a search for its bytes finds out.

    Raises:
        ValueError: The value holds an infinite float or NaN where the schema has a finite one.
    """
    payload = _ENCODER.encode(value)
    if _PERHAPS_SPECIAL.search(payload) is not None:
        wire = decoder.decode(payload)
        builtins: object = msgspec.to_builtins(wire, builtin_types=(bytes,))
        payload = _ENCODER.encode(
            msgspec.convert(_without_negative_zero(builtins), type(wire), builtin_types=(bytes,))
        )
    return payload


def why_not_canonical(wire: Struct, payload: bytes) -> str | None:
    """What is wrong with `payload` as the bytes of `wire`, which was decoded from it."""
    if _ENCODER.encode(wire) != payload:
        return "the same value is written in other bytes"
    if _NEGATIVE_ZERO.search(payload) is not None:
        builtins: object = msgspec.to_builtins(wire, builtin_types=(bytes,))
        if _has_negative_zero(builtins):
            return "it holds a negative zero"
    return None


def strictly_increasing(keys: Sequence[Key]) -> bool:
    """Whether the keys of a sorted array are in order and without repetition."""
    return list(keys) == sorted(set(keys))


def digest(value: Struct) -> str:
    """SHA-256 in hexadecimal over the canonical MessagePack of a wire struct."""
    return hashlib.sha256(_ENCODER.encode(value)).hexdigest()


def _without_negative_zero(value: object) -> object:
    if isinstance(value, float):
        return value + 0.0  # IEEE 754: -0.0 + 0.0 is 0.0, and nothing else changes
    if isinstance(value, (list, tuple)):
        return [_without_negative_zero(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_negative_zero(item) for key, item in value.items()}
    return value


def _has_negative_zero(value: object) -> bool:
    if isinstance(value, float):
        return value == 0.0 and math.copysign(1.0, value) < 0.0
    if isinstance(value, (list, tuple)):
        return any(_has_negative_zero(item) for item in value)
    if isinstance(value, dict):
        return any(_has_negative_zero(item) for item in value.values())
    return False
