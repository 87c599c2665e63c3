"""A reader of rollsync's bytes that knows only what `docs/format.md` says.

It has no line in common with rollsync: the schemas are the tables of the document, MessagePack is
read by another library, and checksums come from xxhash and zlib. A statement of the document that
is wrong or missing makes this reader fail on a golden file, or differ from rollsync on damaged
input.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import xxhash

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "format.md"
_SECTION = re.compile(r"^### (?P<kind>\S+), version (?P<version>[0-9]+)$", re.MULTILINE)
_ROW = re.compile(r"^\| (?P<record>\w*) ?\| (?P<field>\w+) \| (?P<type>[^|]+) \|$", re.MULTILINE)
_TOKEN = re.compile(r'"[^"]*"|[\w.-]+(?:/\w+)?|[\[\]{}?,:−]|[−-]?\d+')

Check = Callable[[object], None]


class Refused(Exception):
    """The input breaks a rule of the document."""


class Map(list[tuple[object, object]]):
    """A MessagePack map as it was written: pairs in order, repetitions included."""


Record = list[tuple[str, Check]]
Tables = dict[str, dict[str, Record]]


def read_document(text: str) -> Tables:
    """The tables of section 4: `kind.vN` -> record -> its fields. The first one is the payload."""
    tables: Tables = {}
    sections = list(_SECTION.finditer(text))
    for section, following in zip(sections, [*sections[1:], None], strict=True):
        name = f"{section['kind']}.v{section['version']}"
        body = text[section.end() : following.start() if following else text.index("\n## 5.")]
        records: dict[str, Record] = {}
        record = ""
        for row in _ROW.finditer(body):
            record = row["record"] or record
            if record == "record":
                continue
            check = _Type(row["type"].split(";")[0].strip(), name, tables).check
            records.setdefault(record, []).append((row["field"], check))
        tables[name] = records
    return tables


class _Type:
    """Parses one type of the notation, and checks values against it."""

    def __init__(self, text: str, section: str, tables: Tables) -> None:
        self._tokens: list[str] = _TOKEN.findall(text)
        self._section = section
        self._tables = tables
        self.check = self._union()
        if self._tokens:
            raise ValueError(f"the document has a type that ends in {self._tokens}: {text}")

    def _take(self, expected: str | None = None) -> str:
        token = self._tokens.pop(0)
        if expected is not None and token != expected:
            raise ValueError(f"the document has {token} where {expected} should be")
        return token

    def _next(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _union(self) -> Check:
        choices = [self._optional()]
        while self._next() == "or":
            self._take()
            choices.append(self._optional())
        return choices[0] if len(choices) == 1 else _any_of(choices)

    def _optional(self) -> Check:
        check = self._single()
        if self._next() == "?":
            self._take()
            return _any_of([_is_nil, check])
        return check

    def _single(self) -> Check:
        token = self._take()
        if token == "[":
            return self._array()
        if token == "{":
            self._take("string")
            self._take(":")
            value = self._union()
            self._take("}")
            return _dictionary(value)
        if token == "sorted":
            self._take("[")
            members = self._array()
            key = ""
            if self._next() == "by":
                self._take()
                key = self._take()
            return _sorted(members, key)
        if token in ("natural", "integer"):
            lowest = 0 if token == "natural" else -(2**63)
            if self._next() == "from":
                self._take()
                sign = -1 if self._next() == "−" else 1
                if sign < 0:
                    self._take()
                lowest = sign * int(self._take())
            return _integer(lowest)
        if token == "digest" and self._next() == "of":
            self._take()
            return DigestOf(self._take())
        if token.startswith('"'):
            return _constant(token[1:-1])
        if token in _PLAIN:
            return _PLAIN[token]
        section, _, record = token.rpartition("/")
        return self._record(section or self._section, record)

    def _array(self) -> Check:
        members = [self._union()]
        while self._next() == ",":
            self._take()
            members.append(self._union())
        self._take("]")
        return _array_of(members[0]) if len(members) == 1 else _tuple_of(members)

    def _record(self, section: str, record: str) -> Check:
        def check(value: object) -> None:
            if record not in self._tables[section]:
                raise Refused(f"the document does not describe {record}")
            _check_record(value, self._tables[section][record])

        return check


def _check_record(value: object, fields: Record) -> None:
    if not isinstance(value, Map) or [key for key, _ in value] != [name for name, _ in fields]:
        raise Refused("a record has other fields, or in another order")
    for (_, item), (_, check) in zip(value, fields, strict=True):
        check(item)
        if isinstance(check, DigestOf):
            record = {check.field: _packable(dict(value)[check.field])}
            if hashlib.sha256(msgpack.packb(record)).hexdigest() != item:
                raise Refused(f"not the digest of {check.field}")


def _is_nil(value: object) -> None:
    if value is not None:
        raise Refused("not nil")


def _any_of(choices: Sequence[Check]) -> Check:
    def check(value: object) -> None:
        if not any(_passes(choice, value) for choice in choices):
            raise Refused("none of the choices")

    return check


def _passes(check: Check, value: object) -> bool:
    try:
        check(value)
    except Refused:
        return False
    return True


def _integer(lowest: int) -> Check:
    def check(value: object) -> None:
        if type(value) is not int or not lowest <= value < 2**63:
            raise Refused("not an integer in range")

    return check


def _constant(constant: str) -> Check:
    def check(value: object) -> None:
        if value != constant:
            raise Refused("another string")

    return check


def _float(value: object) -> None:
    if type(value) is not float or not math.isfinite(value):
        raise Refused("not a finite float")
    if value == 0.0 and math.copysign(1.0, value) < 0.0:
        raise Refused("negative zero")


def _of_type(wanted: type[object]) -> Check:
    def check(value: object) -> None:
        if type(value) is not wanted:
            raise Refused(f"not of type {wanted.__name__}")

    return check


def _digest(value: object) -> None:
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{64}", value) is None:
        raise Refused("not a digest")


class DigestOf:
    """Checks the form of a digest; its record checks that it is that of the field."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __call__(self, value: object) -> None:
        _digest(value)


_PLAIN: dict[str, Check] = {
    "float": _float,
    "bool": _of_type(bool),
    "string": _of_type(str),
    "binary": _of_type(bytes),
    "digest": _digest,
}


def _items(value: object) -> list[object]:
    if type(value) is not list:
        raise Refused("not an array")
    return value


def _array_of(member: Check) -> Check:
    def check(value: object) -> None:
        for item in _items(value):
            member(item)

    return check


def _tuple_of(members: Sequence[Check]) -> Check:
    def check(value: object) -> None:
        items = _items(value)
        if len(items) != len(members):
            raise Refused("an array of another length")
        for item, member in zip(items, members, strict=True):
            member(item)

    return check


def _dictionary(member: Check) -> Check:
    def check(value: object) -> None:
        if not isinstance(value, Map):
            raise Refused("not a map")
        _check_increasing([key for key, _ in value])
        for _, item in value:
            member(item)

    return check


def _sorted(member: Check, key: str) -> Check:
    """`sorted [A, B]` is an array of pairs, so `member` checks one pair; the others check all."""

    def check(value: object) -> None:
        items = _items(value)
        if key:
            member(items)
            _check_increasing([dict(item)[key] for item in items if isinstance(item, Map)])
        elif all(type(item) is list for item in items):
            for item in items:
                member(item)
            _check_increasing([_items(item)[0] for item in items])
        else:
            member(items)
            _check_increasing(items)

    return check


def _check_increasing(keys: Sequence[object]) -> None:
    """Strings by their UTF-8 bytes, integers by their number, none twice."""
    strings = [key.encode() for key in keys if isinstance(key, str)]
    integers = [key for key in keys if isinstance(key, int)]
    if len(strings) not in (0, len(keys)) or len(integers) not in (0, len(keys)):
        raise Refused("keys of different types")
    for ordered in (strings == sorted(set(strings)), integers == sorted(set(integers))):
        if not ordered:
            raise Refused("not in order, or repeated")


def read(data: bytes, tables: Tables) -> tuple[str, int, object]:
    """Kind, version and payload of an envelope; maps come as `Map`.

    Raises:
        Refused: The input breaks a rule of the document.
    """
    if data[:8] != bytes.fromhex("8f 52 53 59 4e 43 0d 0a") or len(data) < 72:
        raise Refused("no header")
    kind_field, version, length, checksum, crc = struct.unpack(">32sIQ16sI", data[8:72])
    if crc != zlib.crc32(data[:68]):
        raise Refused("header checksum")
    kind = kind_field.rstrip(b"\0").decode("ascii", "replace")
    if re.fullmatch("[a-z][a-z0-9.-]{0,31}", kind) is None or f"{kind}.v{version}" not in tables:
        raise Refused("unknown kind or version")
    payload = data[72:]
    if len(payload) != length or xxhash.xxh3_128(payload).digest() != checksum:
        raise Refused("length or checksum")
    try:
        value = msgpack.unpackb(payload, object_pairs_hook=Map, strict_map_key=True)
        same = msgpack.packb(_packable(value)) == payload
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise Refused(str(error)) from error
    records = tables[f"{kind}.v{version}"]
    _check_record(value, next(iter(records.values()), []))
    if not same:
        raise Refused("not the shortest form")
    return kind, version, value


def plain(value: object) -> object:
    """What `read` gave as JSON data: maps become dictionaries, binary base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return _with_dictionaries(value, plain)


def _packable(value: object) -> object:
    return _with_dictionaries(value, _packable)


def _with_dictionaries(value: object, inner: Callable[[object], object]) -> object:
    if isinstance(value, Map):
        return {key: inner(item) for key, item in value}
    if isinstance(value, list):
        return [inner(item) for item in value]
    return value
