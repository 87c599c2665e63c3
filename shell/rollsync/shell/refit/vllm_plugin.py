"""Makes rollsync a weight-transfer backend of vLLM, through its entry point for plug-ins.

`WeightTransferConfig(backend="rollsync")` then selects it. Rules kept here: registering imports
nothing of the backend, and may happen in every process of vLLM, any number of times; and beside a
vLLM that rollsync does not work with it registers nothing and says so, as vLLM also calls it in
engines that have nothing to do with rollsync.
"""

import logging

from rollsync.shell.refit.errors import UnsupportedVllm

NAME = "rollsync"
_MODULE = "rollsync.shell.refit.vllm_transfer"

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by vLLM in each of its processes."""
    try:
        import rollsync.shell.refit.vllm_version  # noqa: F401
    except UnsupportedVllm as error:
        logger.warning("there is no weight-transfer backend %r: %s", NAME, error)
        return
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, _MODULE, "RollsyncWeightTransferEngine")
    if NAME not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            NAME, f"{_MODULE}_trainer", "RollsyncTrainerWeightTransferEngine"
        )
