"""Moving a policy's weights into generation engines: what drives it, and what it runs on.

    sync = CheckpointEngineWeightSynchronizer(policy, generation, config)
    sync.init_communicator()
    report = sync.sync_weights()

`policy` and `generation` are NeMo-RL's, or anything of the shapes in `interfaces`, such as the
groups of Ray actors in `worker_group`. The other modules:

- the driver: `synchronizer` (the order of things), `step_waiting` (how long for), `step_failure`
  (and why in vain), `remote_waits`, `configuration`, `report` (figures, metrics), `errors`;
- a policy worker: `policy_worker` (the mixin), `refit_sender`, `weights`;
- a generation worker: `generation` (what engines offer, and when), `vllm_generation` and
  `torch_generation` (engines in Ray actors), `refit_receiver`, `vllm_worker` (inside vLLM's
  workers), `vllm_loader` and `torch_update` (how a model takes its weights), `vllm_gate` (when it
  may be asked), `vllm_calls` (vLLM's requests), `vllm_version` (which vLLM), `rank_answers` (what
  an engine's ranks answer);
- what of a stream gets into a rank's model, and how: `learned_load` (what is known of its loader),
  `load_recorder` and `operations` (how that is found out), `intake` and `part_assembly`;
- vLLM's own weight transfer with rollsync behind it: `vllm_plugin`, `vllm_transfer`,
  `vllm_transfer_trainer`, `rendezvous`, `beside` (calls that may never return);
- both: `engines` (transports), `engine_slot`, `host_memory`, `boxes` (parts of real tensors).
"""

from rollsync.shell.refit.engines import CheckpointEngine, create_checkpoint_engine
from rollsync.shell.refit.interfaces import WeightSynchronizer
from rollsync.shell.refit.synchronizer import CheckpointEngineWeightSynchronizer

__all__ = [
    "CheckpointEngine",
    "CheckpointEngineWeightSynchronizer",
    "WeightSynchronizer",
    "create_checkpoint_engine",
]
