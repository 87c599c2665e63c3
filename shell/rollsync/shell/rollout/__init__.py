"""Holds what an asynchronous run has in flight, saves it, and resumes it."""

from rollsync.shell.rollout.barrier import DataPlaneCheckpointBarrier

__all__ = ["DataPlaneCheckpointBarrier"]
