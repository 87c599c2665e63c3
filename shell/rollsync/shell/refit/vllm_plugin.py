"""Makes rollsync a weight-transfer backend of vLLM, through its entry point for plug-ins.

`WeightTransferConfig(backend="rollsync")` then selects it. Rule kept here: registering imports
nothing of the backend, and may happen in every process of vLLM, any number of times.
"""

from vllm.distributed.weight_transfer import factory

NAME = "rollsync"
_MODULE = "rollsync.shell.refit.vllm_transfer"


def register() -> None:
    """Called by vLLM in each of its processes."""
    if NAME not in factory.WeightTransferEngineFactory._registry:
        factory.WeightTransferEngineFactory.register_engine(
            NAME, _MODULE, "RollsyncWeightTransferEngine"
        )
    # Releases before the trainer's half was vLLM's own have no such factory.
    trainers = getattr(factory, "WeightTransferTrainerFactory", None)
    if trainers is not None and NAME not in trainers._registry:
        trainers.register_engine(NAME, f"{_MODULE}_trainer", "RollsyncTrainerWeightTransferEngine")
