"""What moves a run's weights, as its configuration has it.

Rule kept here: what a configuration asks of another checkpoint engine than its own goes no further.
The command that read the configuration has told of it (`pure.config.doubtful`), once.
"""

from __future__ import annotations

from rollsync.pure.config import CheckpointEngineConfig
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.refit.interfaces import RefitGeneration, RefitPolicy


def make_synchronizer(
    settings: CheckpointEngineConfig,
    policy: RefitPolicy,
    generation: RefitGeneration,
    *,
    step_timeout_s: float,
) -> CheckpointEngineWeightSynchronizer:
    """A synchronizer of these workers. Nothing is connected yet."""
    backend = settings.backend
    return CheckpointEngineWeightSynchronizer(
        policy,
        generation,
        {
            "backend": backend,
            "update_weights_bucket_memory_ratio": settings.update_weights_bucket_memory_ratio,
            "engine_kwargs": {backend: settings.engine_kwargs.get(backend, {})},
        },
        step_timeout_s=step_timeout_s,
    )
