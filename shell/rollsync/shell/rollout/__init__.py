"""Holds what an asynchronous run has in flight, saves it, and resumes it."""

from rollsync.shell.rollout.barrier import DataPlaneCheckpointBarrier
from rollsync.shell.rollout.parts import RolloutParts
from rollsync.shell.rollout.restore import RolloutRestorer
from rollsync.shell.rollout.snapshots import RolloutSnapshotter

__all__ = [
    "DataPlaneCheckpointBarrier",
    "RolloutParts",
    "RolloutRestorer",
    "RolloutSnapshotter",
]
