"""Either end is killed at every stage: the other one notices, nothing stays, the next sync works.

The deadline is far longer than a test may take, so who gives up in time has noticed the death.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest
import torch

from rollsync.shell.refit.engines import CheckpointEngine
from rollsync.shell.refit.engines.conformance_workers import Rollouts, sample_weights
from rollsync.shell.refit.engines.errors import PeerFailed, PeerLost
from tests.shell.refit.engines.footprint import Footprint, without_collector
from tests.shell.refit.engines.moments import BEFORE_IT, FINALIZES, QUICK, RECEIVER, SENDER
from tests.shell.refit.engines.peers import Peer, engine_of, receive_all, warm_up

NAMES = sorted(sample_weights())
DEADLINE_S = 10_000.0


def cases(moments: Iterable[str]) -> pytest.MarkDecorator:
    """Every moment with every engine; the agents of NIXL take their time to start, and `auto` is
    `shm` here."""
    return pytest.mark.parametrize(
        ("backend", "moment"),
        [
            pytest.param(
                backend,
                moment,
                marks=[pytest.mark.slow] if backend != "shm" and moment not in QUICK else [],
            )
            for backend in ("shm", "nixl", "auto")
            for moment in moments
        ],
    )


@pytest.fixture
def engine(backend: str) -> Iterator[CheckpointEngine]:
    """This process's end, which leaves nothing behind whatever became of the other one."""
    warm_up(backend)
    with without_collector():
        before = Footprint.now()
        engine = engine_of(backend, DEADLINE_S)
        yield engine
        engine.finalize()
        assert before.at_last() == before


def send_to_a_fresh_one(engine: CheckpointEngine, backend: str) -> None:
    fresh = Peer(engine, backend=backend, role="rollout", timeout_s=DEADLINE_S)
    asyncio.run(engine.send_weights(sample_weights().items()))
    fresh.wait_until_done()
    fresh.close()


def receive_from_a_fresh_one(engine: CheckpointEngine, backend: str) -> None:
    fresh = Peer(engine, backend=backend, role="policy", timeout_s=DEADLINE_S)
    assert sorted(asyncio.run(receive_all(engine))) == NAMES
    fresh.wait_until_done()
    fresh.close()


@cases(RECEIVER)
def test_a_killed_receiver_is_noticed_and_a_new_one_gets_everything(
    engine: CheckpointEngine, backend: str, moment: str
) -> None:
    killed = Peer(engine, backend=backend, role="rollout", timeout_s=DEADLINE_S, die=moment)
    if moment == BEFORE_IT:
        killed.wait_until_killed()
    with pytest.raises(PeerLost, match=r"policy 0, while it .*rollout 0") as raised:
        asyncio.run(engine.send_weights(sample_weights().items()))
    assert raised.value.worker == "policy 0"
    assert raised.value.stage
    killed.wait_until_killed()
    killed.close()
    engine.finalize()
    send_to_a_fresh_one(engine, backend)


@cases(SENDER)
def test_a_killed_sender_is_noticed_and_a_new_one_is_received(
    engine: CheckpointEngine, backend: str, moment: str
) -> None:
    killed = Peer(engine, backend=backend, role="policy", timeout_s=DEADLINE_S, die=moment)
    with pytest.raises(PeerLost, match="rollout 0, while it") as raised:
        asyncio.run(receive_all(engine))
    assert raised.value.worker == "rollout 0"
    assert raised.value.stage in SENDER[moment]
    assert (raised.value.tensor != "") == (raised.value.stage in ("read a bucket", "loaded"))
    killed.wait_until_killed()
    killed.close()
    engine.finalize()
    receive_from_a_fresh_one(engine, backend)


@cases(["sent StreamAccepted", FINALIZES])
def test_a_receiver_killed_after_the_stream_is_noticed_by_the_next(
    engine: CheckpointEngine, backend: str, moment: str
) -> None:
    killed = Peer(engine, backend=backend, role="rollout", timeout_s=DEADLINE_S, die=moment)
    asyncio.run(engine.send_weights(sample_weights().items()))
    killed.wait_until_killed()
    killed.close()
    with pytest.raises(PeerLost, match="rollout 0 does not listen any more"):
        asyncio.run(engine.send_weights(sample_weights().items()))
    send_to_a_fresh_one(engine, backend)


@cases(["sent StreamEnded", "received StreamAccepted", FINALIZES])
def test_a_sender_killed_after_the_stream_is_noticed_by_the_next(
    engine: CheckpointEngine, backend: str, moment: str
) -> None:
    killed = Peer(engine, backend=backend, role="policy", timeout_s=DEADLINE_S, die=moment)
    if moment == "sent StreamEnded":
        # Everything has arrived, but not the answer to whoever would have trained on.
        try:
            names = sorted(asyncio.run(receive_all(engine)))
        except PeerLost:
            names = NAMES
        assert names == NAMES
    else:
        assert sorted(asyncio.run(receive_all(engine))) == NAMES
    killed.wait_until_killed()
    killed.close()
    with pytest.raises(PeerLost, match="policy 0, which sends to it, is gone"):
        asyncio.run(receive_all(engine))
    receive_from_a_fresh_one(engine, backend)


@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_the_death_of_one_receiver_is_told_to_the_other(backend: str) -> None:
    with Rollouts(backend, {"refit_timeout_s": DEADLINE_S}, 2) as rollouts:

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in sample_weights().items():
                if name == "three_buckets":
                    rollouts.processes[1].kill()
                    rollouts.processes[1].join()
                yield name, tensor

        with pytest.raises(PeerLost, match="rollout 1 is gone"):
            rollouts.send(weights())
        survivor = rollouts.answer_of(0)
        assert PeerFailed.__name__ in survivor.error_types
        assert "rollout 1 is gone" in survivor.error


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_the_other_receiver_is_told_of_one_that_is_dead_before_the_stream(
    backend: str, dead: int
) -> None:
    with Rollouts(backend, {"refit_timeout_s": DEADLINE_S}, 2) as rollouts:
        rollouts.begin()
        rollouts.processes[dead].kill()
        rollouts.processes[dead].join()
        with pytest.raises(PeerLost, match=f"rollout {dead}"):
            asyncio.run(rollouts.policy.send_weights(sample_weights().items()))
        survivor = rollouts.answer_of(1 - dead)
        assert PeerFailed.__name__ in survivor.error_types
        assert f"rollout {dead}" in survivor.error
