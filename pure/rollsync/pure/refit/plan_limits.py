"""How much `rollsync plan` makes a plan for, so that it answers within seconds.

The limits are several times what a refit has been measured at (docs/scale.md) and what models and
clusters are. No engine knows them: in a sync, no worker plans for others.

Rule kept here: what is beyond a limit is refused before anything is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.dtypes import DTYPE_BYTES
from rollsync.pure.refit.errors import BeyondPlanning, Planned

MOST: Final[dict[Planned, int]] = {
    "policy workers": 10_000,
    "rollout workers": 10_000,
    "layers": 10_000,
    "experts": 100_000,
    "tensors": 200_000,
    "bytes": 16 * 1024**4,
    "parts": 500_000,
}
"""Of a side, of a model, of a layer (experts), and of all layouts together (parts)."""


def beyond(what: Planned, size: int) -> BeyondPlanning | None:
    """What is wrong with so many, or None."""
    most = MOST[what]
    return BeyondPlanning(what=what, size=size, most=most) if size > most else None


def check_model(specs: Iterable[TensorSpec]) -> BeyondPlanning | None:
    """What is wrong with the size of a model, or None."""
    tensors = model_bytes = 0
    for spec in specs:
        tensors += 1
        model_bytes += math.prod(spec.shape) * DTYPE_BYTES.get(spec.dtype, 1)
    return beyond("tensors", tensors) or beyond("bytes", model_bytes)
