"""The batches of one stream as an asynchronous generator that knows why its consumer stopped.

A generator that is closed is told only that it is. But the sender should be told what the loader
died of, and at the moment of `aclose` that error is still being handled around it: so `aclose`
notes it first.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from types import TracebackType

from rollsync.shell.refit.engines.base import Batch
from rollsync.shell.refit.engines.kept_errors import let_go
from rollsync.shell.refit.errors import WeightMismatch


class ConsumerStop:
    """Why the consumer stopped before the end, as far as it can be known."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None

    def describe(self, error: BaseException) -> str:
        """What ended the stream: `error`, or for a closed generator the consumer's own error."""
        cause = self._behind(error)
        if cause is None:
            return "the consumer stopped before the end of the stream"
        return f"{type(cause).__name__}: {cause}"

    def tensor(self, error: BaseException) -> str:
        """The tensor that the consumer's error is about; empty where it names none."""
        cause = self._behind(error)
        return cause.tensor if isinstance(cause, WeightMismatch) else ""

    def _behind(self, error: BaseException) -> BaseException | None:
        return self.cause if isinstance(error, GeneratorExit) else error


class ReceivedBatches(AsyncGenerator[Batch, None]):
    """Wraps the generator that `receive` makes.

    Args:
        receive: makes the generator, given where the consumer's error will be noted.
    """

    def __init__(self, receive: Callable[[ConsumerStop], AsyncGenerator[Batch, None]]) -> None:
        self._stop = ConsumerStop()
        self._batches = receive(self._stop)

    async def asend(self, value: None) -> Batch:
        """The next batch."""
        try:
            return await self._batches.asend(value)
        except BaseException as error:
            let_go(error)
            raise

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Batch:
        """Throw into the generator."""
        try:
            return await self._batches.athrow(typ if isinstance(typ, BaseException) else typ())
        except BaseException as error:
            let_go(error)
            raise

    async def aclose(self) -> None:
        """Close the generator; the sender is told what is being handled now, if anything is."""
        self._stop.cause = sys.exception()
        try:
            await self._batches.aclose()
        finally:
            # Its frames have this generator.
            self._stop.cause = None
