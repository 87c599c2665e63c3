"""Either end is killed at every stage: the other one gives up in time, and a new pair works."""

from __future__ import annotations

import asyncio

import pytest

from rollsync.shell.refit.engines.conformance_workers import sample_weights
from rollsync.shell.refit.engines.errors import PeerLost
from tests.shell.refit.engines.peers import (
    AT_THE_END,
    BEFORE_IT,
    NEVER,
    Peer,
    engine_of,
    receive_all,
)

NAMES = list(sample_weights())
LONG_S = 25.0


@pytest.mark.parametrize("stage", [BEFORE_IT, NAMES[0], "three_buckets", NAMES[-1]])
@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_a_killed_receiver_is_noticed_and_a_new_one_gets_everything(
    backend: str, stage: str
) -> None:
    engine = engine_of(backend, LONG_S)
    killed = Peer(engine, backend=backend, role="rollout", timeout_s=LONG_S, die=stage)
    if stage == BEFORE_IT:
        killed.wait_until_killed()
    with pytest.raises(PeerLost, match=r"policy 0, while it .*rollout 0"):
        asyncio.run(engine.send_weights(sample_weights().items()))
    killed.wait_until_killed()
    killed.close()
    engine.finalize()
    fresh = Peer(engine, backend=backend, role="rollout", timeout_s=LONG_S, die=NEVER)
    asyncio.run(engine.send_weights(sample_weights().items()))
    assert fresh.finished()
    fresh.close()
    engine.finalize()


@pytest.mark.parametrize("stage", [BEFORE_IT, NAMES[0], "three_buckets", AT_THE_END])
@pytest.mark.parametrize("backend", ["shm", "nixl"])
def test_a_killed_sender_is_noticed_and_a_new_one_is_received(backend: str, stage: str) -> None:
    engine = engine_of(backend, LONG_S)
    killed = Peer(engine, backend=backend, role="policy", timeout_s=LONG_S, die=stage)
    with pytest.raises(PeerLost, match="rollout 0, while it"):
        asyncio.run(receive_all(engine))
    killed.wait_until_killed()
    killed.close()
    engine.finalize()
    engine = engine_of(backend, LONG_S)
    fresh = Peer(engine, backend=backend, role="policy", timeout_s=LONG_S, die=NEVER)
    assert asyncio.run(receive_all(engine)) == NAMES
    assert fresh.finished()
    fresh.close()
    engine.finalize()
