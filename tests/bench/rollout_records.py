"""100,000 ledger records: our bytes beside msgspec's own, pickle's and torch's.

`torch.save` gets the records as plain lists and dicts, which is all that its safe load reads; the
conversion is not part of its time.
"""

from __future__ import annotations

import io
import pickle
import random

import msgspec
import torch

from rollsync.codecs import decode, encode
from rollsync.pure.rollout.state import RolloutState
from tests.bench.bench_codecs import group, state_of
from tests.bench.measure import figure, medians_s

RECORDS = 100_000
SIBLINGS = (0, 8)
"""Per group: groups that are only reserved, which cost us most for each record, and usual ones."""
ROUNDS = 3


def record_figures() -> list[dict[str, object]]:
    """Time to encode and to decode, and bytes, for each shape."""
    return [figure for siblings in SIBLINGS for figure in _figures(siblings)]


def _figures(siblings: int) -> list[dict[str, object]]:
    records = [group(number, siblings) for number in range(RECORDS // (1 + 2 * siblings))]
    random.Random(0).shuffle(records)
    state = state_of(records)
    plain = msgspec.to_builtins(records)
    ours, pickled, saved = encode(state), pickle.dumps(records), torch_saved(plain)
    seconds = medians_s(
        {
            "encode": lambda: encode(state),
            "msgspec's bare encode": lambda: msgspec.msgpack.encode(records),
            "pickle.dumps": lambda: pickle.dumps(records),
            "torch.save": lambda: torch_saved(plain),
            "decode": lambda: decode(ours, RolloutState),
            "pickle.loads": lambda: pickle.loads(pickled),
            "torch.load(weights_only=True)": lambda: torch.load(
                io.BytesIO(saved), weights_only=True
            ),
        },
        rounds=ROUNDS,
    )
    what = f"{RECORDS} ledger records, {siblings} siblings per group"
    sides = [
        ("encode", "msgspec's bare encode", 2.0),
        ("encode", "pickle.dumps", None),
        ("encode", "torch.save", None),
        ("decode", "pickle.loads", None),
        ("decode", "torch.load(weights_only=True)", None),
    ]
    return [
        *(
            figure(
                f"{side} {what}",
                seconds[side] * 1e3,
                "milliseconds",
                against=(f"{other}, {seconds[other] * 1e3:.0f} ms", seconds[other] * 1e3),
                goal=goal,
            )
            for side, other, goal in sides
        ),
        *(
            figure(f"bytes of {what}", len(ours), "bytes", against=(name, len(data)))
            for name, data in (("pickle.dumps", pickled), ("torch.save", saved))
        ),
    ]


def torch_saved(plain: object) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(plain, file)
    return file.getvalue()
