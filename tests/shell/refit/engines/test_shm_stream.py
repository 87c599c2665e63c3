"""The shm engine between two real processes: every kind of tensor arrives as it is."""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from collections.abc import Iterator
from contextlib import aclosing
from multiprocessing.connection import Connection

import pytest
import torch

from rollsync.shell.refit.engines import create_checkpoint_engine
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost, TransferTimeout
from rollsync.shell.refit.errors import RefitConfigurationError

BUCKET = 4096
SPAWN = multiprocessing.get_context("spawn")


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    floats = torch.randn(3 * BUCKET // 4)
    matrix = torch.randn(40, 30)
    found = {
        "three_bf16": torch.randn(3).to(torch.bfloat16),
        "then_fp32": torch.randn(5),
        "zero_dimensional": torch.tensor(3.5, dtype=torch.float64),
        "no_bytes": torch.empty(0, 7),
        "transposed": matrix.t(),
        "strided": matrix[::2, 1::3],
        "expanded": torch.randn(1, 4).expand(6, 4),
        "bucket_less_one": torch.randint(0, 255, (BUCKET - 1,), dtype=torch.uint8),
        "bucket": torch.randint(0, 255, (BUCKET,), dtype=torch.uint8),
        "bucket_and_one": torch.randint(0, 255, (BUCKET + 1,), dtype=torch.uint8),
        "three_buckets": floats,
        "three_buckets_transposed": floats.view(48, -1).t(),
        "boolean": torch.tensor([True, False, True]),
        "complex": torch.randn(5, dtype=torch.complex64),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
    }
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
        found[str(dtype)] = torch.randn(9).to(dtype)
    for dtype in (torch.uint16, torch.int8, torch.int64):
        found[str(dtype)] = torch.arange(9).to(dtype)
    return found


def stream(fail_at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in samples().items():
        if name == fail_at:
            raise RuntimeError(f"the trainer lost {name}")
        yield name, tensor


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = one.resolve_conj().contiguous(), other.contiguous()
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


class LoaderBroke(Exception):
    """What a receiver's loader raises in these tests."""


async def receive_once(pipe: Connection, engine: object, fail_at: str) -> None:
    from rollsync.shell.refit.engines import CheckpointEngine

    assert isinstance(engine, CheckpointEngine)
    expected = samples()
    seen: list[str] = []
    try:
        async with aclosing(engine.receive_weight_batches()) as batches:
            async for batch in batches:
                for name, tensor in batch:
                    if name == fail_at:
                        raise LoaderBroke(f"no room for {name}")
                    assert equal(expected[name], tensor), name
                    seen.append(name)
        pipe.send(("received", seen))
    except Exception as error:
        pipe.send(("error", type(error).__name__, str(error)))


def receiver(pipe: Connection, rank: int, timeout_s: float) -> None:
    """Runs one rollout worker: `prepare`, then a stream for every command."""
    try:
        engine = create_checkpoint_engine(
            "shm", bucket_size_bytes=BUCKET, engine_kwargs={"refit_timeout_s": timeout_s}
        )
        pipe.send(engine.prepare())
        metadata, rollouts = pipe.recv()
        engine.init_rollout_process_group(
            rollout_rank=rank, train_world_size=1, rollout_world_size=rollouts, metadata=metadata
        )
        while (command := pipe.recv()) is not None:
            asyncio.run(receive_once(pipe, engine, command))
        engine.finalize()
    except BaseException:
        pipe.send(("crashed", traceback.format_exc()))
        raise


class Pair:
    """This process as policy worker 0, and receivers in processes of their own."""

    def __init__(self, receivers: int = 1, timeout_s: float = 20.0) -> None:
        self.engine = create_checkpoint_engine(
            "shm", bucket_size_bytes=BUCKET, engine_kwargs={"refit_timeout_s": timeout_s}
        )
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(receivers):
            mine, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=receiver, args=(theirs, rank, timeout_s))
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        metadata = [self.engine.prepare(), *(pipe.recv() for pipe in self.pipes)]
        for pipe in self.pipes:
            pipe.send((metadata, receivers))
        self.engine.init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=receivers, metadata=metadata
        )

    def send(self, *, fail_at: str = "", loader_fails_at: str = "") -> None:
        for pipe in self.pipes:
            pipe.send(loader_fails_at)
        asyncio.run(self.engine.send_weights(stream(fail_at)))

    def answers(self) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for pipe in self.pipes:
            assert pipe.poll(30)
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(20)
            pipe.close()
        self.engine.finalize()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


EVERYTHING = [("received", list(samples()))]


def test_every_kind_of_tensor_arrives_and_a_second_stream_too(pair: Pair) -> None:
    for _ in range(3):
        pair.send()
        assert pair.answers() == EVERYTHING


def test_one_sender_feeds_two_receivers() -> None:
    pair = Pair(receivers=2)
    try:
        pair.send()
        assert pair.answers() == EVERYTHING * 2
    finally:
        pair.close()


def test_a_failing_loader_stops_the_sender_with_its_error(pair: Pair) -> None:
    with pytest.raises(PeerFailed, match="LoaderBroke: no room for bucket_and_one"):
        pair.send(loader_fails_at="bucket_and_one")
    assert pair.answers()[0][:2] == ("error", "LoaderBroke")
    pair.send()
    assert pair.answers() == EVERYTHING


def test_a_failing_iterator_stops_the_receiver_with_its_error(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match="the trainer lost three_buckets"):
        pair.send(fail_at="three_buckets")
    (answer,) = pair.answers()
    assert answer[1] == "PeerFailed"
    assert "the trainer lost three_buckets" in str(answer[2])
    pair.send()
    assert pair.answers() == EVERYTHING


def test_a_killed_receiver_is_noticed(pair: Pair) -> None:
    for process in pair.processes:
        process.kill()
        process.join()
    with pytest.raises(PeerLost, match="rollout 0"):
        asyncio.run(pair.engine.send_weights(stream()))


def test_a_receiver_without_sender_gives_up_at_its_deadline() -> None:
    async def wait() -> None:
        engine = create_checkpoint_engine(
            "shm", bucket_size_bytes=BUCKET, engine_kwargs={"refit_timeout_s": 0.2}
        )
        metadata = engine.prepare()
        engine.init_rollout_process_group(
            rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=[metadata, metadata]
        )
        try:
            async with aclosing(engine.receive_weight_batches()) as batches:
                async for _ in batches:
                    pass
        finally:
            engine.finalize()

    with pytest.raises(TransferTimeout, match="rollout 0"):
        asyncio.run(wait())


def test_missing_workers_are_an_error_and_no_wait() -> None:
    engine = create_checkpoint_engine("shm", bucket_size_bytes=BUCKET, engine_kwargs={})
    metadata = engine.prepare()
    with pytest.raises(RefitConfigurationError, match="1 workers answered, 3 are expected"):
        engine.init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=2, metadata=[metadata]
        )
    engine.finalize()


def test_a_worker_that_feeds_nobody_drains_its_iterator() -> None:
    engine = create_checkpoint_engine("shm", bucket_size_bytes=BUCKET, engine_kwargs={})
    metadata = engine.prepare()
    engine.init_policy_process_group(
        worker_rank=1, train_world_size=2, rollout_world_size=1, metadata=[metadata] * 3
    )
    weights = stream()
    asyncio.run(engine.send_weights(weights))
    assert next(weights, None) is None
    engine.finalize()
