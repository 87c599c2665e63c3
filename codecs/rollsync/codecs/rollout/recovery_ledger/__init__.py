"""`rollout.recovery-ledger`: who owns every prompt that is handed out and not yet finished."""

from __future__ import annotations

from typing import Final

import msgspec
from returns.result import Failure, Result, Success
from rpds import HashTrieMap

from rollsync.codecs.canonical import strictly_increasing
from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.rollout.persistent import sorted_values
from rollsync.codecs.rollout.recovery_ledger import v1
from rollsync.pure.rollout.state import PromptGroupRecoveryRecord, RolloutRecoveryLedger


class _Written(msgspec.Struct, frozen=True):
    """The newest wire struct, with the domain's records written as they are."""

    groups: list[PromptGroupRecoveryRecord]


def to_wire(ledger: RolloutRecoveryLedger) -> _Written:
    """The ledger's records, sorted by group id."""
    return _Written(groups=sorted_values(ledger.groups))


def from_wire(wire: v1.RecoveryLedger) -> Result[RolloutRecoveryLedger, Refusal]:
    """The ledger, provided that its groups are sorted by id and none comes twice."""
    if not strictly_increasing([group.group_id for group in wire.groups]):
        return Failure("groups are sorted by group_id, each once")
    return Success(RolloutRecoveryLedger(groups=ledger_groups(wire.groups)))


def ledger_groups(
    groups: tuple[v1.Group, ...],
) -> HashTrieMap[str, PromptGroupRecoveryRecord]:
    """The persistent map of the domain, from the records of version 1."""
    records = msgspec.convert(groups, tuple[PromptGroupRecoveryRecord, ...], from_attributes=True)
    return HashTrieMap({record.group_id: record for record in records})


RECOVERY_LEDGER: Final = kind(
    "rollout.recovery-ledger",
    domain=RolloutRecoveryLedger,
    history=first(v1.RecoveryLedger),
    to_wire=to_wire,
    from_wire=from_wire,
)
