"""The example's engine, hostile to who holds on to views.

Every weight comes alone, and is overwritten when the next one is asked for, as a bucket would be.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from file_engine import FileCheckpointEngine
from rollsync.shell.refit.engines import Batch

OVERWRITING = "tests.shell.refit.overwriting_engine:OverwritingEngine"


class OverwritingEngine(FileCheckpointEngine):
    """Option: `folder`, shared by all workers."""

    def __init__(self, *, bucket_size: int, folder: str) -> None:
        del bucket_size
        super().__init__(bucket_size=1, folder=folder)

    async def receive_weight_batches(self) -> AsyncGenerator[Batch, None]:
        async with aclosing(super().receive_weight_batches()) as batches:
            async for batch in batches:
                yield batch
                for _, tensor in batch:
                    tensor.zero_()
