"""`rollsync.codecs` in someone else's program."""

from typing import assert_type

from returns.pipeline import is_successful
from returns.result import Result

from rollsync.codecs import DecodeError, decode, decode_any, describe, encode
from rollsync.pure.rollout.state import RolloutRecoveryLedger


def copy(ledger: RolloutRecoveryLedger) -> RolloutRecoveryLedger:
    data = encode(ledger)
    assert_type(data, bytes)
    result = decode(data, RolloutRecoveryLedger)
    assert_type(result, Result[RolloutRecoveryLedger, DecodeError])
    if not is_successful(result):
        raise ValueError(describe(result.failure()))
    return result.unwrap()


assert_type(decode_any(b""), Result[object, DecodeError])

decode("text", RolloutRecoveryLedger)  # type: ignore[call-overload]
decode(b"", "rollout.ledger")  # type: ignore[call-overload]


def unread(data: bytes) -> RolloutRecoveryLedger:
    # A result is not the value: the failure has to be looked at.
    return decode(data, RolloutRecoveryLedger)  # type: ignore[return-value]
