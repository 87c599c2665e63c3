"""Encoding and decoding the state of 100,000 ledger records, against msgspec alone.

Goal: encoding takes at most twice as long as a bare `msgspec.msgpack.encode` of the same records.
The bare side does no sorting, no header, no checksum, and gets the records as a list. Neither side
finds them in the order of their memory, as in a run; a third is bare and does (a list that was just
made), which is the fastest that there is. Shapes: groups that are only reserved, and
groups of one, eight and sixteen siblings with one sealed attempt each; counted are the records of
groups, siblings and attempts together.
"""

from __future__ import annotations

import pickle
import random

import msgspec
from rpds import HashTrieMap

from rollsync.codecs import decode, encode
from rollsync.pure.rollout.diff import diff
from rollsync.pure.rollout.state import (
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptReference,
    RecoveryGranularity,
    RolloutAttemptRecord,
    RolloutAttemptStatus,
    RolloutRecoveryLedger,
    RolloutSiblingRecord,
    RolloutState,
    fresh_state,
)
from tests.bench.measure import machine, medians_s, write_results

RECORDS = 100_000
ROUNDS = 7


def group(number: int, siblings: int) -> PromptGroupRecoveryRecord:
    """An unfinished group whose siblings are all sealed."""
    group_id = f"e0p{number}"
    return PromptGroupRecoveryRecord(
        group_id=group_id,
        admission_id=f"admission-{number // 16}" if siblings else None,
        prompt=PromptReference(
            prompt_id=group_id,
            sample_id=f"sample-{number}",
            task="countdown",
            epoch=0,
            position=number,
            content_digest=f"{number:064x}",
        ),
        granularity=RecoveryGranularity.SIBLING,
        expected_generations=8,
        target_step=number // 16 if siblings else None,
        start_weight_version=number // 16 if siblings else None,
        phase=PromptGroupPhase.ADMITTED if siblings else PromptGroupPhase.RESERVED,
        status=PromptGroupStatus.GENERATING,
        siblings=tuple(
            RolloutSiblingRecord(
                index=index,
                attempts=(
                    RolloutAttemptRecord(
                        index=0,
                        status=RolloutAttemptStatus.SEALED,
                        receipt=f"{number * 8 + index:064x}",
                        reward=float(index),
                        masked=False,
                        staged_keys=(f"{group_id}/{index}/attempt-0",),
                    ),
                ),
            )
            for index in range(siblings)
        ),
    )


def state_of(records: list[PromptGroupRecoveryRecord]) -> RolloutState:
    """A state with these groups in its ledger."""
    groups = HashTrieMap({record.group_id: record for record in records})
    return msgspec.structs.replace(
        fresh_state(dataset_digest="d" * 64, seed=1, sampler_stamps_target_steps=True),
        ledger=RolloutRecoveryLedger(groups=groups),
    )


def measure(siblings: int) -> dict[str, object]:
    """Medians and ratios for groups of so many siblings."""
    groups = RECORDS // (1 + 2 * siblings)
    records = [group(number, siblings) for number in range(groups)]
    in_memory_order = list(records)
    random.Random(0).shuffle(records)
    state = state_of(records)
    data = encode(state)
    bare = msgspec.msgpack.encode(records)
    pickled = pickle.dumps(records)
    decoder = msgspec.msgpack.Decoder(list[PromptGroupRecoveryRecord])
    changed = msgspec.structs.replace(records[0], recovery_count=1)
    after = msgspec.structs.replace(
        state,
        ledger=RolloutRecoveryLedger(groups=state.ledger.groups.insert(changed.group_id, changed)),
    )
    seconds = medians_s(
        {
            "encode": lambda: encode(state),
            "bare encode": lambda: msgspec.msgpack.encode(records),
            "bare encode in memory order": lambda: msgspec.msgpack.encode(in_memory_order),
            "pickle": lambda: pickle.dumps(records),
            "decode": lambda: decode(data, RolloutState),
            "bare decode": lambda: decoder.decode(bare),
            "unpickle": lambda: pickle.loads(pickled),
        },
        rounds=ROUNDS,
    )
    return {
        "groups": groups,
        "siblings_per_group": siblings,
        "bytes": len(data),
        "bytes_of_a_difference_of_one_group": len(encode(diff(state, after))),
        "median_ms": {name: round(value * 1e3, 1) for name, value in seconds.items()},
        "encode_to_bare_encode": round(seconds["encode"] / seconds["bare encode"], 2),
        "encode_to_bare_encode_in_memory_order": round(
            seconds["encode"] / seconds["bare encode in memory order"], 2
        ),
        "decode_to_bare_decode": round(seconds["decode"] / seconds["bare decode"], 2),
        "encode_to_pickle": round(seconds["encode"] / seconds["pickle"], 2),
        "decode_to_unpickle": round(seconds["decode"] / seconds["unpickle"], 2),
    }


if __name__ == "__main__":
    write_results(
        {
            "machine": machine(["msgspec", "rpds-py", "xxhash"]),
            "goal": {"encode_to_bare_encode": 2.0},
            "shapes": [measure(0), measure(1), measure(8), measure(16)],
        }
    )
