"""Checkpoint engines: the contract, the factory, and the built-in engines by name."""

from rollsync.shell.refit.engines.base import Batch, CheckpointEngine, DeclaringEngine, Weights
from rollsync.shell.refit.engines.factory import create_checkpoint_engine

__all__ = ["Batch", "CheckpointEngine", "DeclaringEngine", "Weights", "create_checkpoint_engine"]
