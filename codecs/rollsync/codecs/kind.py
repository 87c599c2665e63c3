"""A kind: one sort of value that has bytes, with the whole history of its schema.

Rule kept here: any version that a release has written can be read for ever, and only the newest is
written. A kind's package shows its history in one place:

    KIND = kind(
        "room.name",
        domain=DomainStruct,
        history=first(v1.Thing).then(v2.Thing, v2.from_v1),
        to_wire=to_wire,
        from_wire=from_wire,
    )

Each `vN.py` holds one wire struct (and the structs inside it), which never changes once released,
and the pure function from the version before. `to_wire` and `from_wire` stand beside the history
and know the newest version only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.codecs.canonical import Wire, encode_canonical, why_not_canonical
from rollsync.codecs.envelope import Header, open_payload, read_header, seal
from rollsync.codecs.errors import (
    BrokenRule,
    DecodeError,
    MalformedPayload,
    NewerVersion,
    NoSuchVersion,
    NotCanonical,
    WrongKind,
)

T = TypeVar("T")
W = TypeVar("W", bound=Wire)
Older = TypeVar("Older", bound=Wire)
Newer = TypeVar("Newer", bound=Wire)

Refusal = str
"""Why a well-formed wire value is no legal value: the rule that it breaks, in words."""


@dataclass(frozen=True)
class History(Generic[W]):
    """All versions of a schema, oldest first; `W` is the newest wire struct.

    `wires[n - 1]` is version n, and `readers[n - 1]` takes a payload of version n all the way to
    the newest wire struct.
    """

    newest: type[W]
    wires: tuple[type[Wire], ...]
    readers: tuple[Callable[[str, bytes], Result[W, MalformedPayload | NotCanonical]], ...]

    def then(self, newer: type[Newer], upgrade: Callable[[W], Newer]) -> History[Newer]:
        """The history with one more version, and how the version before it is read as it."""

        def upgraded(
            read: Callable[[str, bytes], Result[W, MalformedPayload | NotCanonical]],
        ) -> Callable[[str, bytes], Result[Newer, MalformedPayload | NotCanonical]]:
            return lambda kind, payload: read(kind, payload).map(upgrade)

        return History(
            newest=newer,
            wires=(*self.wires, newer),
            readers=(
                *(upgraded(read) for read in self.readers),
                _strict_reader(newer, len(self.wires) + 1),
            ),
        )


def first(wire: type[W]) -> History[W]:
    """The history that begins (and for now ends) with version 1."""
    return History(newest=wire, wires=(wire,), readers=(_strict_reader(wire, 1),))


def _strict_reader(
    wire: type[W], version: int
) -> Callable[[str, bytes], Result[W, MalformedPayload | NotCanonical]]:
    decoder = msgspec.msgpack.Decoder(wire)

    def read(kind: str, payload: bytes) -> Result[W, MalformedPayload | NotCanonical]:
        try:
            value = decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Failure(MalformedPayload(kind=kind, version=version, why=str(error)))
        why = why_not_canonical(value, payload)
        if why is not None:
            return Failure(NotCanonical(kind=kind, version=version, why=why))
        return Success(value)

    return read


@dataclass(frozen=True)
class Kind(Generic[T]):
    """How values of one domain type become bytes and come back. Made by `kind`."""

    name: str
    domain: type[T]
    wires: tuple[type[Wire], ...]
    write_payload: Callable[[T], bytes]
    read_payload: Callable[[int, bytes], Result[T, DecodeError]]

    @property
    def newest_version(self) -> int:
        """The version that `encode` writes."""
        return len(self.wires)

    def encode(self, value: T) -> bytes:
        """Envelope and canonical payload of `value`, in the newest version."""
        return seal(self.name, self.newest_version, self.write_payload(value))

    def encode_object(self, value: object) -> bytes:
        """`encode` for a caller that knows the type only at run time.

        Raises:
            TypeError: The value is not of this kind's domain type.
        """
        if not isinstance(value, self.domain):
            raise TypeError(f"kind {self.name} does not write {type(value).__name__}")
        return self.encode(value)

    def decode(self, data: bytes) -> Result[T, DecodeError]:
        """The value in an envelope of this kind, of any known version."""
        header = read_header(data)
        if not is_successful(header):
            return Failure(header.failure())
        return self.decode_after(header.unwrap(), data)

    def decode_after(self, header: Header, data: bytes) -> Result[T, DecodeError]:
        """`decode` for a caller that has read the header already."""
        if header.kind != self.name:
            return Failure(WrongKind(expected=self.name, found=header.kind))
        if header.version > self.newest_version:
            return Failure(
                NewerVersion(
                    kind=self.name, version=header.version, newest_known=self.newest_version
                )
            )
        if header.version < 1:
            return Failure(NoSuchVersion(kind=self.name, version=header.version))
        payload = open_payload(header, data)
        if not is_successful(payload):
            return Failure(payload.failure())
        return self.read_payload(header.version, payload.unwrap())


def kind(
    name: str,
    *,
    domain: type[T],
    history: History[W],
    to_wire: Callable[[T], object],
    from_wire: Callable[[W], Result[T, Refusal]],
) -> Kind[T]:
    """Puts a kind together.

    Args:
        name: The kind's name in the envelope, `room.thing`. Never changes.
        domain: The struct in `pure` that this kind writes and reads.
        history: Every version of the schema.
        to_wire: The newest wire struct of a value, or something that encodes to the same bytes
            (large collections of records whose domain struct has the shape of the wire struct are
            written as they are: converting 100,000 of them takes longer than encoding them).
        from_wire: The value of the newest wire struct, or the rule that it breaks.
    """
    decoder = msgspec.msgpack.Decoder(history.newest)

    def write_payload(value: T) -> bytes:
        return encode_canonical(to_wire(value), decoder)

    def read_payload(version: int, payload: bytes) -> Result[T, DecodeError]:
        wire = history.readers[version - 1](name, payload)
        if not is_successful(wire):
            return Failure(wire.failure())
        value = from_wire(wire.unwrap())
        if not is_successful(value):
            return Failure(BrokenRule(kind=name, version=version, rule=value.failure()))
        return Success(value.unwrap())

    return Kind(
        name=name,
        domain=domain,
        wires=history.wires,
        write_payload=write_payload,
        read_payload=read_payload,
    )
