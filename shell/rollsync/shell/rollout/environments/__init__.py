"""Rollout state that an environment's backend keeps between turns: protocols, and one backend."""

from rollsync.shell.rollout.environments.protocol import (
    EnvironmentCheckpoint,
    EnvironmentResumeError,
    EnvironmentSaveError,
    EnvironmentSnapshot,
    NoEnvironmentCheckpoint,
)

__all__ = [
    "EnvironmentCheckpoint",
    "EnvironmentResumeError",
    "EnvironmentSaveError",
    "EnvironmentSnapshot",
    "NoEnvironmentCheckpoint",
]
