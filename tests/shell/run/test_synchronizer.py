"""What of a run's configuration its synchronizer is given."""

from __future__ import annotations

import pytest

from rollsync.pure.config import CheckpointEngineConfig
from rollsync.shell.refit import CheckpointEngineWeightSynchronizer
from rollsync.shell.run.synchronizer import make_synchronizer
from tests.shell.refit.recording import Log, RecordingGeneration, RecordingPolicy


@pytest.mark.parametrize(
    ("backend", "given"),
    [("shm", {"shm": {"direct": True}}), ("auto", {"auto": {}})],
)
def test_a_run_has_said_already_that_other_engines_options_are_not_read(
    backend: str, given: dict[str, dict[str, object]]
) -> None:
    settings = CheckpointEngineConfig(
        backend=backend,
        update_weights_bucket_memory_ratio=0.5,
        engine_kwargs={"shm": {"direct": True}, "nixl": {"device": "cpu"}},
    )
    policy = RecordingPolicy(Log(), 1)
    generation = RecordingGeneration(Log(), 1, 1, async_engine=True)
    made = make_synchronizer(settings, policy, generation, step_timeout_s=60.0)
    assert made == CheckpointEngineWeightSynchronizer(
        policy,
        generation,
        {
            "backend": backend,
            "update_weights_bucket_memory_ratio": 0.5,
            "engine_kwargs": given,
        },
        step_timeout_s=60.0,
    )
