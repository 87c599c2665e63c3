"""Moving a policy's weights into generation engines: what drives it, and what it runs on.

    sync = CheckpointEngineWeightSynchronizer(policy, generation, config)
    sync.init_communicator()
    report = sync.sync_weights()

`policy` and `generation` are NeMo-RL's, or anything of the shapes in `interfaces`. The other
modules: `synchronizer` (the order of things), `report` (figures and metrics), `errors`.
"""

from rollsync.shell.refit.interfaces import WeightSynchronizer
from rollsync.shell.refit.synchronizer import CheckpointEngineWeightSynchronizer

__all__ = ["CheckpointEngineWeightSynchronizer", "WeightSynchronizer"]
