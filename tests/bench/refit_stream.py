"""One end of a stream of weights, as every benchmark of an engine has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

import torch

from rollsync.shell.refit.engines import CheckpointEngine


def connect(engine: CheckpointEngine, index: int, metadata: Sequence[object]) -> None:
    """Let an engine know all ends: the policy worker, whose index is 0, and rollout workers."""
    worlds = {"train_world_size": 1, "rollout_world_size": len(metadata) - 1}
    if index == 0:
        engine.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
    else:
        engine.init_rollout_process_group(rollout_rank=index - 1, metadata=metadata, **worlds)


async def stream(engine: CheckpointEngine, index: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Send all weights, or load them."""
    if index == 0:
        await engine.send_weights(weights.items())
        return
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            for name, tensor in batch:
                weights[name].copy_(tensor)
