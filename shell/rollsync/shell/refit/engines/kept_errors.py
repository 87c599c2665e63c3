"""What an error keeps, and how to let go of it.

An error has the frames that it passed, and they have what was known there: streams, batches,
buffers. Whoever keeps the error keeps all of that; and since `asyncio` raises it from a frame that
has the task that has the error, it keeps itself, until Python's collector comes by, which a
trainer may have switched off.

Rules kept here: only frames of this package's engines, and of NIXL under them, are emptied, as
those of a trainer's iterator or an engine's loader are their authors' to look into; and what is
left of an error is what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Final, TypeVar

from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

_T = TypeVar("_T")
_EMPTIED: Final = (__name__.rpartition(".")[0], "nixl")
"""How the names of the modules begin whose frames are emptied. NIXL's have handles of reads, and
these have the agent."""


def let_go(error: BaseException) -> None:
    """Empty the frames of the engines that an error passed, and that the errors which led to it
    passed, other than those that still run."""
    for each in _chain(error):
        trace = each.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            if str(frame.f_globals.get("__name__", "")).startswith(_EMPTIED):
                # One that still runs cannot be emptied, and what it has is its own.
                with contextlib.suppress(RuntimeError):
                    frame.clear()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += (each.__cause__, each.__context__)


def run_stream(work: Coroutine[object, object, _T]) -> _T:
    """`asyncio.run` for one end of a stream: its error goes when its caller is done with it."""
    outcome = asyncio.run(_outcome(work))
    if is_successful(outcome):
        return outcome.unwrap()
    error = outcome.failure()
    try:
        # Outside of the task, which is in no frame that this passes.
        raise error
    finally:
        del error, outcome


async def _outcome(work: Coroutine[object, object, _T]) -> Result[_T, Exception]:
    try:
        return Success(await work)
    except Exception as error:
        return Failure(error)
