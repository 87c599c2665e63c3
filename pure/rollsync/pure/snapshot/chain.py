"""How the rollout state of a bundle lies on disk: whole, or as a difference to the save before.

A chain is a base (the whole state) and the differences that came after it, oldest first. Each is a
segment: written once, named by its content, shared by the bundles whose chains begin alike. Rules
kept here:

1. What a save adds is as large as what changed. A base comes again when the differences have grown
   to half of it, or are many: so the bytes written stay within a factor of what changed, and what
   a resume reads within a factor of the state.
2. A trainer checkpoint begins a chain: it is small beside the weights, and so damage to a segment
   costs the snapshots of one step, and not the checkpoints before and after it.
"""

from __future__ import annotations

from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.manifest import SnapshotSegment

MAX_DIFFERENCES = 64
"""In a chain: at one save a minute, the state is written whole about once an hour."""


def extends(
    chain: tuple[SnapshotSegment, ...], difference_bytes: int, kind: CheckpointKind
) -> bool:
    """Whether a save writes a difference of so many bytes behind `chain`; else, the whole state.

    Args:
        chain: that of the save that the difference is to; empty when there is none.
    """
    if kind is CheckpointKind.TRAINER_CHECKPOINT or not 0 < len(chain) <= MAX_DIFFERENCES:
        return False
    base, *differences = chain
    total = difference_bytes + sum(segment.size_bytes for segment in differences)
    return 2 * total <= base.size_bytes
