"""A checkpoint engine whose stream is written down beforehand."""

from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

import torch

from rollsync.shell.refit.engines import Batch, CheckpointEngine, Weights

SCRIPTED = "tests.shell.refit.scripted_engine:ScriptedEngine"


class ScriptedEngine(CheckpointEngine):
    """Yields `script`, batch by batch; an exception in it is raised in its place."""

    script: ClassVar[Sequence[Batch | Exception]] = ()
    made: ClassVar[list["ScriptedEngine"]] = []

    def __init__(self, *, bucket_size: int, **engine_kwargs: object) -> None:
        self.options = (bucket_size, engine_kwargs)
        self.calls: list[object] = []
        self.sent: list[tuple[str, torch.Tensor]] = []
        ScriptedEngine.made.append(self)

    def prepare(self) -> dict[str, object]:
        self.calls.append("prepare")
        return {"endpoint": "here"}

    def init_policy_process_group(self, **topology: object) -> None:
        self.calls.append(topology)

    def init_rollout_process_group(self, **topology: object) -> None:
        self.calls.append(topology)

    async def send_weights(self, weights: Weights) -> None:
        self.sent = [(name, tensor.clone()) for name, tensor in weights]

    async def receive_weight_batches(self) -> AsyncGenerator[Batch, None]:
        for batch in self.script:
            if isinstance(batch, Exception):
                raise batch
            try:
                yield batch
            except GeneratorExit:
                self.calls.append("stopped early")
                raise

    def finalize(self) -> None:
        self.calls.append("finalize")
