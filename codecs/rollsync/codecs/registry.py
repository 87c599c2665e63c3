"""Every kind that rollsync knows, and the two calls that find the right one.

To add a kind: write its package (see `rollsync.codecs.kind`), add it to `KINDS`, and give the
tests sample values of it in `tests/codecs/samples/`.
"""

from __future__ import annotations

import hashlib
from typing import Final, Protocol, TypeVar, overload

from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.codecs.canonical import Wire
from rollsync.codecs.envelope import HEADER_BYTES, Header, read_header
from rollsync.codecs.errors import DecodeError, UnknownKind
from rollsync.codecs.kind import Kind
from rollsync.codecs.refit.control import CONTROL_MESSAGE
from rollsync.codecs.refit.plan import DECLARED_PLAN
from rollsync.codecs.rollout.data_plane_checkpoint import DATA_PLANE_CHECKPOINT
from rollsync.codecs.rollout.recovery_ledger import RECOVERY_LEDGER
from rollsync.codecs.rollout.replay_metadata import REPLAY_METADATA
from rollsync.codecs.rollout.state import ROLLOUT_STATE
from rollsync.codecs.rollout.state_diff import STATE_DIFF
from rollsync.codecs.snapshot.anchor import SNAPSHOT_ANCHOR
from rollsync.codecs.snapshot.manifest import SNAPSHOT_MANIFEST

T = TypeVar("T")


class AnyKind(Protocol):
    """A kind whose domain type is known only at run time."""

    @property
    def name(self) -> str: ...
    @property
    def domain(self) -> type[object]: ...
    @property
    def wires(self) -> tuple[type[Wire], ...]: ...
    @property
    def newest_version(self) -> int: ...
    def encode_object(self, value: object) -> bytes: ...
    def decode_after(self, header: Header, data: bytes) -> Result[object, DecodeError]: ...


KINDS: Final[tuple[AnyKind, ...]] = (
    CONTROL_MESSAGE,
    DATA_PLANE_CHECKPOINT,
    DECLARED_PLAN,
    RECOVERY_LEDGER,
    REPLAY_METADATA,
    ROLLOUT_STATE,
    SNAPSHOT_ANCHOR,
    SNAPSHOT_MANIFEST,
    STATE_DIFF,
)
_BY_NAME: Final = {kind.name: kind for kind in KINDS}
_BY_DOMAIN: Final = {kind.domain: kind for kind in KINDS}


def kind_named(name: str) -> AnyKind | None:
    """The kind of that name, if this rollsync knows one."""
    return _BY_NAME.get(name)


def encode(value: object) -> bytes:
    """The bytes of `value`: envelope and canonical payload, in its kind's newest version.

    Raises:
        TypeError: No kind has values of this type.
        ValueError: The value holds NaN or an infinite float where that has no meaning.
    """
    kind = _BY_DOMAIN.get(type(value))
    if kind is None:
        raise TypeError(f"rollsync has no codec for {type(value).__name__}")
    return kind.encode_object(value)


def payload_digest(value: object) -> str:
    """SHA-256, hexadecimal, of the canonical payload of `value`: its identity without a header.

    Raises:
        TypeError: No kind has values of this type.
        ValueError: The value holds NaN or an infinite float where that has no meaning.
    """
    return hashlib.sha256(memoryview(encode(value))[HEADER_BYTES:]).hexdigest()


@overload
def decode(data: bytes, kind: Kind[T]) -> Result[T, DecodeError]: ...
@overload
def decode(data: bytes, kind: type[T]) -> Result[T, DecodeError]: ...
def decode(data: bytes, kind: Kind[T] | type[T]) -> Result[T, DecodeError]:
    """The value in `data`, which has to be of the given kind, in any version ever released.

    Args:
        data: A whole envelope: the content of a file, or a message.
        kind: The kind, or the domain type that it writes and reads.

    Raises:
        TypeError: `kind` is a type that has no codec.
    """
    if isinstance(kind, Kind):
        return kind.decode(data)
    known = _BY_DOMAIN.get(kind)
    if known is None:
        raise TypeError(f"rollsync has no codec for {kind.__name__}")
    header = read_header(data)
    if not is_successful(header):
        return Failure(header.failure())
    result = known.decode_after(header.unwrap(), data)
    if not is_successful(result):
        return Failure(result.failure())
    value = result.unwrap()
    if not isinstance(value, kind):
        raise TypeError(f"kind {known.name} read a {type(value).__name__}")
    return Success(value)


def decode_any(data: bytes) -> Result[object, DecodeError]:
    """The value in `data`, of whatever kind its header names (for tools that show files)."""
    header = read_header(data)
    if not is_successful(header):
        return Failure(header.failure())
    kind = _BY_NAME.get(header.unwrap().kind)
    if kind is None:
        return Failure(UnknownKind(kind=header.unwrap().kind))
    return kind.decode_after(header.unwrap(), data)
