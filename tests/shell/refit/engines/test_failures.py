"""What the built-in engines say when something fails, and who gets in."""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import aclosing

import pytest
import torch

from rollsync.shell.refit.engines import CheckpointEngine
from rollsync.shell.refit.engines.addresses import connect
from rollsync.shell.refit.engines.conformance_workers import (
    LoaderFailed,
    Rollouts,
    sample_weights,
    stream_failing_at,
)
from rollsync.shell.refit.engines.errors import PeerFailed, TransferError
from rollsync.shell.refit.engines.memory import BufferAllocationError, SharedBuffers
from rollsync.shell.refit.engines.nixl_agent import NixlAgent, RegistrationError
from rollsync.shell.refit.engines.outlets import PARTS
from rollsync.shell.refit.engines.receiving import READS_AHEAD
from rollsync.shell.refit.engines.staged import BUFFERS
from rollsync.shell.refit.errors import RefitConfigurationError, WeightMismatch
from rollsync.shell.refit.weights import with_version
from tests.shell.refit.engines.pairs import BUCKET_BYTES, Pair, pair
from tests.shell.refit.engines.peers import Peer, engine_of, receive_all

BACKENDS = ["shm", "nixl", "auto"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def both_ends(sender: CheckpointEngine, receiver: CheckpointEngine) -> list[object]:
    """What became of a stream on either side."""
    return list(
        await asyncio.gather(
            sender.send_weights(sample_weights().items()),
            receive_all(receiver),
            return_exceptions=True,
        )
    )


def test_the_sender_raises_what_the_loader_died_of(backend: str) -> None:
    with Rollouts(backend, {}, 1) as rollouts:
        rollouts.loader_fails_at = "bucket_and_one"
        with pytest.raises(PeerFailed, match="LoaderFailed: no room for bucket_and_one") as caught:
            rollouts.send(sample_weights().items())
        assert caught.value.worker == "policy 0"


def test_the_receiver_raises_what_the_iterator_died_of(backend: str) -> None:
    with Rollouts(backend, {}, 1) as rollouts:
        rollouts.send_failing(stream_failing_at("three_buckets"))
        (answer,) = rollouts.answers()
        assert PeerFailed.__name__ in answer.error_types
        assert "the trainer lost three_buckets" in answer.error


def test_a_receiver_hears_of_a_failure_also_while_a_read_waits_for_the_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def announced_and_lost() -> Iterator[tuple[str, torch.Tensor]]:
        # More parts than a receiver looks ahead for, so that it hears of them before the failure.
        for index in range(2 * READS_AHEAD):
            yield f"part {index}", torch.zeros(BUCKET_BYTES * BUFFERS // PARTS, dtype=torch.uint8)
        raise ValueError("the trainer lost the rest")

    # A sender that has failed answers no reader any more, so this one's first read never comes.
    monkeypatch.setattr(NixlAgent, "progress", lambda _: None)
    with pair("nixl") as ends:
        _, heard = ends.stream(announced_and_lost()).errors
    assert isinstance(heard, PeerFailed)
    assert "the trainer lost the rest" in str(heard)


def test_every_receiver_hears_of_the_failure_of_one(backend: str) -> None:
    with Rollouts(backend, {}, 2) as rollouts:
        rollouts.loader_fails_at = "bucket_and_one"
        rollouts.send_failing(sample_weights().items())
        answers = rollouts.answers()
        assert all(LoaderFailed.__name__ in answer.error for answer in answers)


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (WeightMismatch("what came is another", tensor="second"), "second"),
        (ValueError("no such parameter"), "first to third"),
    ],
)
def test_a_load_that_failed_is_told_with_the_tensor_that_it_is_about_or_all_it_may_be(
    error: Exception, named: str
) -> None:
    weights = [(name, torch.ones(2)) for name in ("first", "second", "third")]

    async def load(engine: CheckpointEngine) -> None:
        async with aclosing(engine.receive_weight_batches()) as batches:
            await anext(batches)
            raise error

    async def stream(ends: Pair) -> tuple[BaseException | None, BaseException | None]:
        return await asyncio.gather(
            ends.sender.send_weights(with_version(weights, 1)),
            load(ends.receivers[0]),
            return_exceptions=True,
        )

    with pair("shm") as ends:
        sent, received = asyncio.run(stream(ends))
    assert received is error
    assert isinstance(sent, PeerFailed)
    assert sent.tensor == named
    assert f"failed while it loaded, at tensor {named}: {type(error).__name__}" in str(sent)


def test_a_stuck_receiver_is_given_up_at_the_deadline(backend: str) -> None:
    async def stuck(engine: CheckpointEngine) -> None:
        receiving = engine.receive_weight_batches()
        await anext(receiving)
        # Never asks for the next batch.
        await asyncio.to_thread(sender.process.join, 60)
        await receiving.aclose()

    engine = engine_of(backend, 20.0)
    sender = Peer(engine, backend=backend, role="policy", timeout_s=1.5)
    asyncio.run(stuck(engine))
    assert sender.process.exitcode == 1
    sender.close()
    engine.finalize()


def entrance(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """The address and the secret by which a sender of this host comes in."""
    on_host = metadata.get("on_host")
    return on_host if isinstance(on_host, Mapping) else metadata


def hostile_frames() -> Iterator[bytes]:
    yield struct.pack(">I", 2**32 - 1) + bytes(16)
    bomb = pickle.dumps(print)
    yield struct.pack(">I", len(bomb)) + bytes(16) + bomb
    yield b"GET / HTTP/1.1\r\n\r\n" * 3
    yield b""


def test_strangers_are_turned_away_and_the_sender_still_gets_in(backend: str) -> None:
    engine = engine_of(backend, 20.0)
    sender = Peer(engine, backend=backend, role="policy", timeout_s=20.0)
    address = str(entrance(engine.prepare())["address"])

    async def knock(frame: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with await connect(address) as connection:
            await loop.sock_sendall(connection, frame)
            return await loop.sock_recv(connection, 1 << 16)

    async def receive_among_strangers() -> list[str]:
        knocking = [asyncio.create_task(knock(frame)) for frame in hostile_frames()]
        names = await receive_all(engine)
        for task in knocking:
            task.cancel()
        await asyncio.gather(*knocking, return_exceptions=True)
        return names

    assert sorted(asyncio.run(receive_among_strangers())) == sorted(sample_weights())
    sender.wait_until_done()
    sender.close()
    engine.finalize()


def test_silent_strangers_keep_nobody_waiting(backend: str) -> None:
    receiver, sender = engine_of(backend, 5.0), engine_of(backend, 5.0)
    metadata = [sender.prepare(), receiver.prepare()]
    worlds = {"train_world_size": 1, "rollout_world_size": 1}
    receiver.init_rollout_process_group(rollout_rank=0, metadata=metadata, **worlds)
    sender.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)

    async def both() -> list[str]:
        # More than are greeted at a time, and each would be waited for as long as the sender waits.
        silent = [await connect(str(entrance(metadata[1])["address"])) for _ in range(100)]
        sending = asyncio.create_task(sender.send_weights(sample_weights().items()))
        names = await receive_all(receiver)
        await sending
        for connection in silent:
            connection.close()
        return names

    assert sorted(asyncio.run(both())) == sorted(sample_weights())
    sender.finalize()
    receiver.finalize()


def test_another_runs_secret_does_not_get_in(backend: str) -> None:
    receiver, sender = engine_of(backend, 1.0), engine_of(backend, 1.0)
    metadata = [sender.prepare(), receiver.prepare()]
    receiver.init_rollout_process_group(
        rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
    )
    wrong = {**entrance(metadata[1]), "secret": "00" * 32}
    metadata[1] = {**metadata[1], **wrong, "on_host": wrong}
    sender.init_policy_process_group(
        worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
    )

    assert all(
        isinstance(error, TransferError) for error in asyncio.run(both_ends(sender, receiver))
    )
    sender.finalize()
    receiver.finalize()


def test_world_sizes_that_differ_from_the_peers_are_refused_at_once(backend: str) -> None:
    receiver, sender = engine_of(backend, 20.0), engine_of(backend, 20.0)
    theirs, ours = sender.prepare(), receiver.prepare()
    receiver.init_rollout_process_group(
        rollout_rank=0,
        train_world_size=2,
        rollout_world_size=1,
        metadata=[theirs, theirs, ours],
    )
    sender.init_policy_process_group(
        worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[theirs, ours]
    )

    sent, received = asyncio.run(both_ends(sender, receiver))
    assert isinstance(received, RefitConfigurationError)
    assert isinstance(sent, PeerFailed)
    assert "counts 1 policy and 1 rollout workers" in str(sent)
    sender.finalize()
    receiver.finalize()


def test_buffers_larger_than_free_memory_are_refused_and_nothing_is_reserved() -> None:
    with pytest.raises(BufferAllocationError, match=r"2 transfer buffers .* are free"):
        SharedBuffers.allocate(2, 1 << 60)


class HalfRegistering:
    """A NIXL agent that registers one buffer and no second one."""

    def __init__(self) -> None:
        self.registered: list[int] = []

    def register_memory(
        self, regions: list[tuple[int, int, int, str]], mem_type: str, backends: list[str]
    ) -> int:
        if self.registered:
            raise RuntimeError("out of locked memory")
        self.registered.append(regions[0][0])
        return regions[0][0]

    def deregister_memory(self, registered: int) -> None:
        self.registered.remove(registered)


def test_a_registration_that_fails_half_way_leaves_nothing_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, half = NixlAgent("UCX", {}), HalfRegistering()
    monkeypatch.setattr(agent, "_agent", half)
    buffers = [torch.empty(4096, dtype=torch.uint8) for _ in range(2)]
    with pytest.raises(RegistrationError, match=r"transfer buffer 2 of 2 .* out of locked memory"):
        agent.register(buffers)
    assert half.registered == []
