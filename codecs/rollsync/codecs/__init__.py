"""Bytes of everything that rollsync writes to disk or sends between processes.

    data = encode(value)
    result = decode(data, RECOVERY_LEDGER)      # Result[RolloutRecoveryLedger, DecodeError]
    result = decode(data, RolloutRecoveryLedger)  # the same, by the type of the value

The bytes are specified in `docs/format.md`.
"""

from rollsync.codecs.envelope import Header, read_header
from rollsync.codecs.errors import DecodeError, describe
from rollsync.codecs.kind import Kind
from rollsync.codecs.registry import decode, decode_any, encode, kind_named, payload_digest

__all__ = [
    "DecodeError",
    "Header",
    "Kind",
    "decode",
    "decode_any",
    "describe",
    "encode",
    "kind_named",
    "payload_digest",
    "read_header",
]
