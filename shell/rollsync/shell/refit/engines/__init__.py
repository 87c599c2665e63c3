"""The transports that carry weights, behind one contract.

The modules: `base` (the contract, and engines by name).
"""

from rollsync.shell.refit.engines.base import CheckpointEngine, create_checkpoint_engine

__all__ = ["CheckpointEngine", "create_checkpoint_engine"]
