"""What an error does not keep that comes out of a stream; Python's collector is off meanwhile."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from rollsync.shell.refit.engines import CheckpointEngine
from rollsync.shell.refit.engines.channel import ControlChannel
from rollsync.shell.refit.engines.conformance_workers import (
    IteratorFailed,
    LoaderFailed,
    sample_weights,
    stream_failing_at,
)
from rollsync.shell.refit.engines.kept_errors import run_stream
from rollsync.shell.refit.engines.mapping import anonymous_memory
from rollsync.shell.refit.engines.rings import StreamRing
from rollsync.shell.refit.engines.sending import SendingStream
from tests.shell.refit.engines.footprint import without_collector
from tests.shell.refit.engines.pairs import pair

OF_A_STREAM = (ControlChannel, StreamRing, SendingStream)


@pytest.fixture(autouse=True)
def _nobody_tidies_up() -> Iterator[None]:
    with without_collector():
        yield


def living() -> list[object]:
    """The objects of streams that there are."""
    return [each for each in gc.get_objects() if type(each) in OF_A_STREAM]


async def load_until(engine: CheckpointEngine, name: str) -> None:
    """Receive, and fail at a tensor."""
    async with aclosing(engine.receive_weight_batches()) as batches:
        async for batch in batches:
            if name in dict(batch):
                raise LoaderFailed(f"no room for {name}")


@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_errors_that_are_kept_keep_nothing_of_a_stream(backend: str) -> None:
    with pair(backend) as both:
        (receiver,) = both.receivers

        async def streams() -> list[object]:
            errors: list[object] = []
            for weights, fails_at in (
                (stream_failing_at("three_buckets"), ""),
                (iter(sample_weights().items()), "bucket"),
            ):
                errors += await asyncio.gather(
                    both.sender.send_weights(weights),
                    load_until(receiver, fails_at),
                    return_exceptions=True,
                )
            return errors

        errors = asyncio.run(streams())
        assert [isinstance(each, Exception) for each in errors] == [True] * 4
        assert living() == []


class Weights:
    """What a trainer's iterator has."""


async def failing(weights: Weights) -> None:
    await asyncio.sleep(0)
    raise IteratorFailed(f"no more of {weights}")


def test_an_error_of_a_stream_goes_when_its_caller_is_done_with_it() -> None:
    weights = Weights()
    kept = weakref.ref(weights)
    work = failing(weights)
    del weights
    with pytest.raises(IteratorFailed, match="no more of") as raised:
        run_stream(work)
    assert kept() is not None
    del work, raised
    assert kept() is None


def test_a_stream_that_ends_well_gives_what_it_has() -> None:
    async def seven() -> int:
        return 7

    assert run_stream(seven()) == 7


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def test_memory_that_is_given_back_is_free_whoever_still_has_a_tensor_there() -> None:
    size = 64 << 20
    memory = anonymous_memory(size)
    kept = memory.tensor[5:]
    kept.fill_(7)
    before = resident_kib()
    memory.release()
    memory.release()
    assert before - resident_kib() > size // 1024 * 0.9
    assert len(memory.tensor) == 0
    assert not torch.any(kept[:100])
